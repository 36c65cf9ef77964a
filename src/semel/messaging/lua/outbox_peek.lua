-- Which parts have anything at all that is due. KEYS: for each part its stream and its due set. ARGV: "1" to tell for how long.
-- Answers, for each part: ms since its oldest message became due (0 if not asked), or -1.
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
local found = {}
for i = 1, #KEYS, 2 do
    local age = -1
    if ARGV[1] ~= '1' then  -- without reading a body
        if redis.call('XLEN', KEYS[i]) > 0 or redis.call('ZCOUNT', KEYS[i + 1], '-inf', now) > 0 then age = 0 end
    else
        local first = redis.call('XRANGE', KEYS[i], '-', '+', 'COUNT', 1)[1]
        if first then age = math.max(0, now - tonumber(first[2][22]) * 1000) end
        local due = redis.call('ZRANGEBYSCORE', KEYS[i + 1], '-inf', now, 'WITHSCORES', 'LIMIT', 0, 1)
        if due[2] then age = math.max(age, now - tonumber(due[2])) end
    end
    found[#found + 1] = math.floor(age)
end
return found
