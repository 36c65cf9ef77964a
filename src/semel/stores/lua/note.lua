-- Remember a step: model.note. Appends to the record; the lease and the lifetime stay as they are.
--
-- KEYS  1 record   2 tombstone      (one hash tag)
-- ARGV  1 packed: skew (double), length of the nonce, nonce      2 the entry
-- reply 8 bytes of the scope hash, the nonce, one letter: O ok   L lost   G gone   R refused   X unreadable
local skew, size = unpack('<dB', ARGV[1])
if #ARGV[1] ~= 9 + size or not ARGV[2] then return redis.error_reply('ERR semel: the note is malformed') end
local now = real + skew
local mine = sub(ARGV[1], 10)
local echo = sub(KEYS[1], -32, -25) .. mine

--@include head

if text == nil then return echo .. 'X' end
if not seen or seen == EXPIRED then return echo .. 'G' end
if nonce ~= mine then return echo .. 'L' end
if state ~= RUNNING then return echo .. 'R' end
-- Sent again after a lost reply it is appended again: the last entry of a name counts, so that changes nothing.
redis.call('APPEND', KEYS[1], ARGV[2])
redis.call('SETRANGE', KEYS[1], 33, pack('<ddddI4', now, expires, lease_until, now, steps_size + #ARGV[2]))
return echo .. 'O'
