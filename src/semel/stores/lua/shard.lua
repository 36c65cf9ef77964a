-- What shards hold for people: the hashes of open runs, of failures, or of a ref's records. Never writes.
--
-- KEYS  the sorted sets to read (in a cluster those of one hash tag)
-- ARGV  none
-- reply the hashes whose records have not ended by time
local clock = redis.call('TIME')
local real = string.format('(%.0f', clock[1] * 1000 + clock[2] / 1000)
local found = {}
for _, key in ipairs(KEYS) do
  for _, hash in ipairs(redis.call('ZRANGEBYSCORE', key, real, '+inf')) do
    found[#found + 1] = hash
  end
end
return found
