-- A batch of another outbox's relay into this one, once. One slot.
-- KEYS: numbers of the sender's part, meta, seq, counts, times of bodies that are over, then of each row: stream, tenants, id, body.
-- ARGV: token, epoch, batch, parts, retention (ms), MessagePack of [hash, id, tenant, topic, key, type, schema, headers, raw, for how long
--       its body is kept (ms) or "" if that is in the row] for each row, then each row's body.
-- Answers {the number that was found, epoch}; {-1, epoch} if a later owner has been here; {-2, places of the rows whose ids are known
-- with another content}; {-3} if somebody has swept a body meanwhile. A token that was seen is answered again: the answer was lost.
-- Everything is looked at before anything is written, and the number comes last: Lua does not roll back.
local epoch, batch = tonumber(ARGV[2]), tonumber(ARGV[3])
local known = redis.call('HMGET', KEYS[1], 'epoch', 'batch', 'token')
local last_epoch, last = tonumber(known[1] or '0'), tonumber(known[2] or '0')
if known[3] == ARGV[1] then return {batch - 1, last_epoch} end
if last_epoch > epoch then return {-1, last_epoch} end
if last ~= batch - 1 then
    if last_epoch < epoch then redis.call('HSET', KEYS[1], 'epoch', ARGV[2]) end
    return {last, last_epoch}
end
local meta = redis.call('GET', KEYS[2])
if not meta or cjson.decode(meta).parts ~= tonumber(ARGV[4]) then
    return redis.error_reply('SEMELPARTS the outbox is not here, or divided into another number of parts')
end
local rows = cmsgpack.unpack(ARGV[6])
if #rows ~= #ARGV - 6 or #rows * 4 ~= #KEYS - 5 then return redis.error_reply('ERR ' .. #rows .. ' rows, ' .. #ARGV - 6 .. ' bodies') end
if redis.acl_check_cmd then
    for _, verb in ipairs({{'HSET', 1}, {'INCR', 3}, {'HINCRBY', 4}, {'XADD', 6}, {'ZADD', 7}, {'SET', 8}, {'SET', 9}}) do
        if not redis.acl_check_cmd(verb[1], KEYS[verb[2]]) then
            return redis.error_reply('NOPERM the outbox needs the right to ' .. verb[1] .. ' ' .. KEYS[verb[2]])
        end
    end
end
local fresh, conflicts = {}, {-2}
for i, row in ipairs(rows) do
    local before = redis.call('GET', KEYS[5 + 4 * i - 1])
    if not before then
        fresh[#fresh + 1] = i
        if row[10] ~= '' and redis.call('GET', KEYS[5 + 4 * i]) ~= 'reserved' then return {-3} end
    elseif string.sub(before, 1, 64) ~= row[1] then
        conflicts[#conflicts + 1] = i
    end
end
if #conflicts > 1 then return conflicts end
redis.call('HSET', KEYS[1], 'epoch', ARGV[2])
local time = redis.call('TIME')
local created = string.format('%d.%06d', time[1], time[2])
for _, i in ipairs(fresh) do
    local row, key = rows[i], 5 + 4 * i
    local seq = redis.call('INCR', KEYS[3])
    redis.call('XADD', KEYS[key - 3], seq .. '-0', 'id', row[2], 'tenant', row[3], 'topic', row[4], 'key', row[5], 'type', row[6],
        'schema', row[7], 'headers', row[8], 'body', ARGV[6 + i], 'raw', row[9], 'created', created, 'ready', created)
    redis.call('ZADD', KEYS[key - 2], 'NX', seq, row[3])
    redis.call('HINCRBY', KEYS[4], row[4], 1)
    redis.call('SET', KEYS[key - 1], row[1] .. ':' .. ARGV[5])
    if row[10] ~= '' then redis.call('SET', KEYS[key], row[10]) end
end
redis.call('HSET', KEYS[1], 'batch', ARGV[3], 'token', ARGV[1])
redis.pcall('SPUBLISH', KEYS[2], '')
return {last, last_epoch}
