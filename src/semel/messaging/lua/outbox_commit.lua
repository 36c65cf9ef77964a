-- What a relay writes about one part, all of it or nothing, under the part's epoch. One slot.
-- KEYS: part, stream, lines, kept, times of the kept, counts, tenants, then one id per removed row.
-- ARGV: token, epoch, state ("" leaves it), new epoch ("" leaves it), "1" gives the part back; then, each with its number in
--       front: removed rows (number, topic), held lines (name, JSON, after in seconds or "" for parked), names that flow again,
--       kept batches (field, rows), kept batches with another number (field, new field).
-- Answers 1, or 0 if the epoch is another one. A token that was seen is answered 1 and does nothing: the answer was lost.
local part = redis.call('HMGET', KEYS[1], 'epoch', 'token')
if part[2] == ARGV[1] then return 1 end
if part[1] ~= ARGV[2] then return 0 end
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local at = 6
local function number()
    at = at + 1
    return tonumber(ARGV[at - 1])
end
for i = 1, number() do
    if redis.call('XDEL', KEYS[2], ARGV[at] .. '-0') == 1 then
        if redis.call('HINCRBY', KEYS[6], ARGV[at + 1], -1) <= 0 then redis.call('HDEL', KEYS[6], ARGV[at + 1]) end
    end
    local known = redis.call('GET', KEYS[7 + i])
    if known then redis.call('PEXPIRE', KEYS[7 + i], string.sub(known, 66)) end
    at = at + 2
end
if redis.call('XLEN', KEYS[2]) == 0 then redis.call('DEL', KEYS[7]) end
for _ = 1, number() do
    local line = cjson.decode(ARGV[at + 1])
    local before = redis.call('HGET', KEYS[3], ARGV[at])
    line.since = before and cjson.decode(before).since or now
    if ARGV[at + 2] ~= '' then line['until'] = now + tonumber(ARGV[at + 2]) end
    redis.call('HSET', KEYS[3], ARGV[at], cjson.encode(line))
    at = at + 3
end
for _ = 1, number() do
    redis.call('HDEL', KEYS[3], ARGV[at])
    at = at + 1
end
for _ = 1, number() do
    redis.call('HSET', KEYS[4], ARGV[at], ARGV[at + 1])
    redis.call('ZADD', KEYS[5], now, ARGV[at])
    at = at + 2
end
for _ = 1, number() do
    local rows, when = redis.call('HGET', KEYS[4], ARGV[at]), redis.call('ZSCORE', KEYS[5], ARGV[at])
    if rows then
        redis.call('HDEL', KEYS[4], ARGV[at])
        redis.call('ZREM', KEYS[5], ARGV[at])
        redis.call('HSET', KEYS[4], ARGV[at + 1], rows)
        redis.call('ZADD', KEYS[5], when or now, ARGV[at + 1])
    end
    at = at + 2
end
redis.call('HSET', KEYS[1], 'token', ARGV[1])
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'state', ARGV[3]) end
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'epoch', ARGV[4]) end
if ARGV[5] == '1' then redis.call('HDEL', KEYS[1], 'owner') end
return 1
