-- A batch of a relay into a stream, once. KEYS: the stream, the frontier (one slot).
-- ARGV: epoch, batch, maxlen ("" for none), then per row: id, topic, key, headers, data, more (JSON [name, value, …] or "").
-- Answers the frontier that it found; -1 and the epoch found if a later owner has been here.
-- Everything is looked at before anything is written: Lua does not roll back.
local epoch, batch = tonumber(ARGV[1]), tonumber(ARGV[2])
local known = redis.call('HMGET', KEYS[2], 'epoch', 'batch')
local last_epoch, last = tonumber(known[1] or '0'), tonumber(known[2] or '0')
if last_epoch > epoch then return {-1, last_epoch} end
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'none' and kind ~= 'stream' then
    return redis.error_reply('WRONGTYPE ' .. KEYS[1] .. ' is a ' .. kind .. ', not a stream')
end
if last >= batch or last < batch - 1 then
    if last_epoch < epoch then redis.call('HSET', KEYS[2], 'epoch', ARGV[1]) end
    return {last, last_epoch}
end
redis.call('HSET', KEYS[2], 'epoch', ARGV[1], 'batch', ARGV[2])
for i = 4, #ARGV, 6 do
    local more = ARGV[i + 5]
    if more == '' then
        redis.call('XADD', KEYS[1], '*', 'id', ARGV[i], 'topic', ARGV[i + 1], 'key', ARGV[i + 2],
            'headers', ARGV[i + 3], 'data', ARGV[i + 4])
    else
        redis.call('XADD', KEYS[1], '*', 'id', ARGV[i], 'topic', ARGV[i + 1], 'key', ARGV[i + 2],
            'headers', ARGV[i + 3], 'data', ARGV[i + 4], unpack(cjson.decode(more)))
    end
end
if ARGV[3] ~= '' then redis.call('XTRIM', KEYS[1], 'MAXLEN', '~', ARGV[3]) end
return {last, last_epoch}
