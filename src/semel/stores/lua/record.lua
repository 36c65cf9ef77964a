-- The packed record. This text is put before each script that reads or writes one.
--
-- One string per record, little-endian, no padding; `redis_record.py` is the other reader of this layout:
--   head   0 magic, version, state, flags | 4 attempts | 8 fingerprint version, its length, length of the nonce
--         11 lengths of tenant, operation, key | 17 token | 25 created | 33 updated | 41 expires
--   wide  49 lease_until | 57 noted | 65 length of steps | 69 tombstone | 77 not_before
--         85 lengths of ref (65535: none), marker, secret id | 91 length of labels | 95 length of error
--   parts nonce, fingerprint, tenant, operation, key, ref, marker, secret id, labels, error, steps, result
-- A settled record whose wide block would say nothing leaves it out: that is the common one, and memory counts.
-- `updated`, `expires`, `lease_until`, `noted` and the length of steps lie together, and steps are the last part of a
-- run: a renewal or a note is one SETRANGE (and one APPEND), however long the record has become.
--
-- Times are seconds of the *server's* clock as doubles, exactly as in model.py; huge means never. A test may
-- shift that clock by `skew`; lifetimes (PXAT, index scores, both in milliseconds) are on the unshifted one.
--
-- No functions, here and in what follows: a closure over these locals costs more than all the rest of a replay.
-- What scripts share is text instead: a line `--@include x` stands for x.lua.
local MAGIC, VERSION = 0x5E, 1
local RUNNING, DONE, FAILED, UNKNOWN, RELEASED, EXPIRED = 1, 2, 3, 4, 5, 6
local RETRY, HOLD = 0, 2
local RESOLVED, WIDE, BURIED = 4, 8, 16 -- flags; the two lowest bits are the policy (retry 0, probe 1, hold 2)
local HEAD, REST = '<BBBBI4BBBHHHI8ddd', '<ddI4ddHHHI4I4'
local HEAD_SIZE, WIDE_SIZE, NO_REF = 49, 99, 65535
-- The wide block of a run without steps, ref and marker, from `noted` up to the length of the secret id: most runs, so it
-- is known by sight.
local BARE = '\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\255\255\0\0'
local NEVER = 9e15 -- milliseconds from which on a lifetime is for ever
local huge, ceil, max, band, pack, unpack, sub = math.huge, math.ceil, math.max, bit.band, struct.pack, struct.unpack, string.sub

local clock = redis.call('TIME')
local real = clock[1] + clock[2] / 1000000
