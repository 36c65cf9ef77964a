-- Read a record as it is stored. Never writes.
--
-- KEYS  1 record   2 tombstone      (one hash tag)
-- ARGV  1 packed: skew (double), 1 if a large record may be sent
-- reply 8 bytes of the scope hash, one letter, now (double), the record if there is one:
--       R record   N nothing   X unreadable   L the record is large: ask on the other connection
local skew, large = unpack('<dB', ARGV[1])
local now = real + skew
local echo, moment = sub(KEYS[1], -32, -25), pack('<d', now)

--@include find

if text == nil then return echo .. 'X' .. moment end
if text == false then return echo .. 'N' .. moment end
if large == 0 and #text > 65536 then return echo .. 'L' .. moment end
return echo .. 'R' .. moment .. text
