-- Read a scope's audit trail. Never writes.
--
-- KEYS  1 audit trail
-- ARGV  1 packed: skew (double)
-- reply now (packed double), then the lines, oldest first (their layout: settle.lua)
local skew = struct.unpack('<d', ARGV[1])
local clock = redis.call('TIME')
local lines = redis.call('LRANGE', KEYS[1], 0, -1)
table.insert(lines, 1, struct.pack('<d', clock[1] + clock[2] / 1000000 + skew))
return lines
