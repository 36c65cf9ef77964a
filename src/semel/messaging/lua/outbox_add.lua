#!lua
-- A message into the outbox, inside the caller's MULTI/EXEC. One slot. The first line makes it a write: a server that is full,
-- cannot persist or has too few replicas refuses it when it is queued, and with it the whole transaction.
-- KEYS: meta, seq, stream, due, counts, tenants, id; and that of its body, if that is kept elsewhere.
-- ARGV: parts, hash, retention (ms), due after (ms, "" for none), due at (ms, "" for none), then id, tenant, topic, key, type,
--       schema, headers, body, raw ("" where there is none); and for how long its body is kept (ms) once it was delivered.
-- Answers 1, or 0 if the id is known with this content. What can fail comes first: Lua does not roll back, nor does EXEC.
local known = redis.call('GET', KEYS[7])
if known then
    if string.sub(known, 1, 64) == ARGV[2] then return 0 end
    return redis.error_reply('SEMELCONFLICT message id ' .. ARGV[6] .. ' was used before with another content')
end
local meta = redis.call('GET', KEYS[1])
if not meta or cjson.decode(meta).parts ~= tonumber(ARGV[1]) then
    return redis.error_reply('SEMELPARTS the outbox is not here, or divided into another number of parts')
end
-- A user who may not do all of it does nothing of it: refused in the middle it would leave half (Redis 7 can tell before).
if redis.acl_check_cmd then
    for _, verb in ipairs({{'INCR', 2}, {'XADD', 3}, {'ZADD', 4}, {'HINCRBY', 5}, {'ZADD', 6}, {'SET', 7}}) do
        if not redis.acl_check_cmd(verb[1], KEYS[verb[2]]) then
            return redis.error_reply('NOPERM the outbox needs the right to ' .. verb[1] .. ' ' .. KEYS[verb[2]])
        end
    end
end
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
local created = string.format('%d.%06d', time[1], time[2])
local due = 0
if ARGV[4] ~= '' then due = now + tonumber(ARGV[4]) elseif ARGV[5] ~= '' then due = tonumber(ARGV[5]) end
if due > now then
    -- Its number comes first: of those with the same time the one that was added first goes first. It also fixes the number of parts.
    local number = string.format('%016d', redis.call('INCR', KEYS[2]))
    local packed = cmsgpack.pack({number, ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11], ARGV[12], ARGV[13], ARGV[14], created})
    redis.call('ZADD', KEYS[4], due, packed)
else
    local seq = redis.call('INCR', KEYS[2])
    redis.call('XADD', KEYS[3], seq .. '-0', 'id', ARGV[6], 'tenant', ARGV[7], 'topic', ARGV[8], 'key', ARGV[9],
        'type', ARGV[10], 'schema', ARGV[11], 'headers', ARGV[12], 'body', ARGV[13], 'raw', ARGV[14],
        'created', created, 'ready', created)
    redis.call('ZADD', KEYS[6], 'NX', seq, ARGV[7])
end
redis.call('HINCRBY', KEYS[5], ARGV[8], 1)
redis.call('SET', KEYS[7], ARGV[2] .. ':' .. ARGV[3])
if KEYS[8] then redis.call('SET', KEYS[8], ARGV[15]) end
-- A hint for relays that listen; they look now and then anyway. Where it is forbidden it is not tried: an error counts, also
-- one that is caught, and `within` takes an EXEC with errors for one that was not applied as a whole.
if not redis.acl_check_cmd or redis.acl_check_cmd('SPUBLISH', KEYS[1]) then redis.pcall('SPUBLISH', KEYS[1], '') end
return 1
