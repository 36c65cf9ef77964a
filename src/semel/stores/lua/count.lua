-- Add up the counters of shards. Never writes.
--
-- KEYS  the hashes of counters (in a cluster one of them)
-- ARGV  none
-- reply name, sum, name, sum …
local sums = {}
for _, key in ipairs(KEYS) do
  local found = redis.call('HGETALL', key)
  for at = 1, #found, 2 do
    sums[found[at]] = (sums[found[at]] or 0) + found[at + 1]
  end
end
local flat = {}
for name, sum in pairs(sums) do
  flat[#flat + 1] = name
  flat[#flat + 1] = string.format('%.0f', sum)
end
return flat
