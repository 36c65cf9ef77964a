-- A batch of a relay into a stream, once. KEYS: the stream, the frontier (one slot).
-- ARGV: epoch, batch, maxlen ("" for none), MessagePack of [id, topic, key, headers, name, value, …] for each row, then each
-- row's data (MessagePack of this Lua knows no binary). One argument a row, because the client pays for every argument.
-- Answers the frontier that it found; -1 and the epoch found if a later owner has been here.
-- Everything is looked at before anything is written: Lua does not roll back. The number comes behind the rows: a user who may
-- not XADD is refused with the number unchanged, and the batch is sent again, not taken for one that is there.
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
local rows = cmsgpack.unpack(ARGV[4])
if #rows ~= #ARGV - 4 then return redis.error_reply('ERR ' .. #rows .. ' rows, ' .. #ARGV - 4 .. ' bodies') end
redis.call('HSET', KEYS[2], 'epoch', ARGV[1])
for i, row in ipairs(rows) do
    redis.call('XADD', KEYS[1], '*', 'id', row[1], 'topic', row[2], 'key', row[3], 'headers', row[4],
        'data', ARGV[4 + i], unpack(row, 5))
end
redis.call('HSET', KEYS[2], 'batch', ARGV[2])
if ARGV[3] ~= '' then redis.call('XTRIM', KEYS[1], 'MAXLEN', '~', ARGV[3]) end
return {last, last_epoch}
