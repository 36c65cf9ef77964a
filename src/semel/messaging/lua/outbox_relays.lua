-- The relays of a team, or of all teams. KEYS: relays. ARGV: relay ("" only asks), lease (ms; "" takes it away), about.
-- Answers, for each one that lives: its name, ms left, ms since it came, about.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[1] ~= '' and ARGV[2] == '' then
    redis.call('HDEL', KEYS[1], ARGV[1])
elseif ARGV[1] ~= '' then
    local before = redis.call('HGET', KEYS[1], ARGV[1])
    local since = before and cjson.decode(before).since or now
    redis.call('HSET', KEYS[1], ARGV[1], cjson.encode({['until'] = now + tonumber(ARGV[2]), since = since, about = ARGV[3]}))
end
local all, found = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #all, 2 do
    local relay = cjson.decode(all[i + 1])
    if relay['until'] > now then
        found[#found + 1] = all[i]
        found[#found + 1] = string.format('%d', relay['until'] - now)
        found[#found + 1] = string.format('%d', now - relay.since)
        found[#found + 1] = relay.about or ''
    elseif relay['until'] < now - 600000 then
        redis.call('HDEL', KEYS[1], all[i])
    end
end
return found
