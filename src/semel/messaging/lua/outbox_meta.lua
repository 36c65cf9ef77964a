-- What the outbox says of itself. KEYS: meta, seq. ARGV: meta to write if there is none ("" only asks), parts ("" any).
-- Another number of parts is taken as long as no message was ever added. Answers the meta that holds, or "".
local known = redis.call('GET', KEYS[1])
if ARGV[1] == '' then return known or '' end
if known then
    local meta = cjson.decode(known)
    if ARGV[2] == '' or meta.parts == tonumber(ARGV[2]) or redis.call('EXISTS', KEYS[2]) == 1 then return known end
    meta.parts = tonumber(ARGV[2])
    redis.call('SET', KEYS[1], cjson.encode(meta))
else
    redis.call('SET', KEYS[1], ARGV[1])
end
return redis.call('GET', KEYS[1])
