-- Extend a lease: model.renew. Touches 24 bytes and the lifetime, however large the record is.
--
-- KEYS  1 record   2 tombstone   3 index of open runs      (one hash tag)
-- ARGV  1 packed: lease, retention, skew (doubles), length of the nonce, nonce
-- reply 8 bytes of the scope hash, the nonce, one letter: O ok   L lost   G gone   X unreadable
local lease, retention, skew, size = unpack('<dddB', ARGV[1])
if #ARGV[1] ~= 25 + size or not (lease >= 0 and lease < huge and retention >= 0) then
  return redis.error_reply('ERR semel: the renewal is malformed')
end
local now = real + skew
local mine = sub(ARGV[1], 26)
local echo = sub(KEYS[1], -32, -25) .. mine

--@include head

if text == nil then return echo .. 'X' end
if not seen or seen == EXPIRED then return echo .. 'G' end
if nonce ~= mine then return echo .. 'L' end
if state ~= RUNNING then return echo .. 'O' end -- settled while the heartbeat was on its way
local gone = policy == RETRY and now + lease + retention or huge
local milliseconds = ceil((gone - now + real) * 1000)
local ends = milliseconds < NEVER and string.format('%.0f', milliseconds) or '+inf'
redis.call('ZADD', KEYS[3], ends, sub(KEYS[1], -32))
redis.call('SETRANGE', KEYS[1], 33, pack('<ddd', now, gone, now + lease))
if milliseconds < NEVER then
  redis.call('PEXPIREAT', KEYS[1], ends)
else
  redis.call('PERSIST', KEYS[1])
end
return echo .. 'O'
