-- Kept batches that nobody will ask for. KEYS: for each part its kept batches and their times. ARGV: for how long (seconds).
local time = redis.call('TIME')
local before, count = time[1] + time[2] / 1000000 - tonumber(ARGV[1]), 0
for i = 1, #KEYS, 2 do
    for _, field in ipairs(redis.call('ZRANGEBYSCORE', KEYS[i + 1], '-inf', before, 'LIMIT', 0, 100)) do
        redis.call('HDEL', KEYS[i], field)
        redis.call('ZREM', KEYS[i + 1], field)
        count = count + 1
    end
end
return count
