-- Drop index entries whose records are gone: those that ended by time, and those found to be absent.
--
-- KEYS  the sorted sets to clean, then the records to look for      (in a cluster of one hash tag)
-- ARGV  1 how many of the keys are sorted sets   2 how many entries to drop at most
-- reply how many were dropped
local sets, most = tonumber(ARGV[1]), tonumber(ARGV[2])
if not sets or not most or sets > #KEYS or most < 0 then return redis.error_reply('ERR semel: the sweep is malformed') end
local clock = redis.call('TIME')
local real = string.format('%.0f', clock[1] * 1000 + clock[2] / 1000)
local dropped = 0
for at = 1, sets do
  if dropped == most then return dropped end
  for _, hash in ipairs(redis.call('ZRANGEBYSCORE', KEYS[at], '-inf', real, 'LIMIT', 0, most - dropped)) do
    dropped = dropped + redis.call('ZREM', KEYS[at], hash)
  end
end
for at = sets + 1, #KEYS do
  if redis.call('EXISTS', KEYS[at]) == 0 then
    for set = 1, sets do
      dropped = dropped + redis.call('ZREM', KEYS[set], string.sub(KEYS[at], -32))
    end
  end
end
return dropped
