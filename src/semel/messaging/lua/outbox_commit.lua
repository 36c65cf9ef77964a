-- What a relay writes about one part, all of it or nothing, under the part's epoch. One slot.
-- KEYS: part, stream, lines, kept, times of the kept, counts, tenants, times of bodies that are over, then one id per removed
--       row, then one per body of a removed row.
-- ARGV: token, epoch, state ("" leaves it), new epoch ("" leaves it), "1" gives the part back; then, each with its number in
--       front: removed rows (number, topic, name of its body or ""), held lines (name, JSON, after in seconds or "" for parked), names that flow again,
--       kept batches (field, rows), kept batches with another number (field, new field).
-- Answers 1, or 0 if the epoch is another one. A token that was seen is answered 1 and does nothing: the answer was lost.
local part = redis.call('HMGET', KEYS[1], 'epoch', 'token')
if part[2] == ARGV[1] then return 1 end
if part[1] ~= ARGV[2] then return 0 end
-- A user who may not do all of it does nothing of it: refused in the middle it would leave half (Redis 7 can tell before).
if redis.acl_check_cmd then
    for _, verb in ipairs({{'HSET', 1}, {'HDEL', 1}, {'XDEL', 2}, {'XLEN', 2}, {'HGET', 3}, {'HSET', 3}, {'HDEL', 3}, {'HGET', 4}, {'HSET', 4}, {'HDEL', 4},
        {'ZADD', 5}, {'ZADD', 8}, {'ZREM', 5}, {'ZSCORE', 5}, {'HINCRBY', 6}, {'HDEL', 6}, {'DEL', 7}, {'PEXPIRE', 7}, {'GET', 7}, {'MGET', 7}}) do
        if not redis.acl_check_cmd(verb[1], KEYS[verb[2]]) then
            return redis.error_reply('NOPERM the outbox needs the right to ' .. verb[1] .. ' ' .. KEYS[verb[2]])
        end
    end
end
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local at = 6
local function number()
    at = at + 1
    return tonumber(ARGV[at - 1])
end
local removed = number()
local body = 8 + removed
for from = 1, removed, 500 do  -- many rows in one command: each command of a script costs more than what it does
    local upto = math.min(from + 499, removed)
    local topics = {}
    for i = from, upto do
        local topic = ARGV[at + 3 * i - 2]
        topics[topic] = topics[topic] or {}
        table.insert(topics[topic], ARGV[at + 3 * i - 3] .. '-0')
    end
    for topic, numbers in pairs(topics) do
        local gone = redis.call('XDEL', KEYS[2], unpack(numbers))
        if gone > 0 and redis.call('HINCRBY', KEYS[6], topic, -gone) <= 0 then redis.call('HDEL', KEYS[6], topic) end
    end
    local ids = redis.call('MGET', unpack(KEYS, 8 + from, 8 + upto))
    for i = from, upto do
        local known = ids[i - from + 1]
        if known then redis.call('PEXPIRE', KEYS[8 + i], string.sub(known, 66)) end
        local digest = ARGV[at + 3 * i - 1]
        if digest ~= '' then
            body = body + 1
            local keep = tonumber(redis.call('GET', KEYS[body]) or '')
            if keep then redis.call('ZADD', KEYS[8], 'NX', now * 1000 + keep, digest) end
        end
    end
end
at = at + 3 * removed
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
