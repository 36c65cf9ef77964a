-- Before the EXEC of within(), on the connection that watches the record: what is there, where the EXEC will be applied.
--
-- KEYS  1 the record   2 the note of exec_begin.lua
-- ARGV  1 the nonce of the run
-- reply 0 nothing   1 it runs under this nonce   2 anything else; an error: this user, or this server now, refuses what it takes
--       to write the record
--
-- Layout: see record.lua (the state is the third byte; the nonce of a run comes after its wide block). An EXEC does not roll back: who
-- may not write must hear of it before the commands are applied, so a note is written, and taken away.
local text = redis.pcall('GET', KEYS[1])
if type(text) == 'table' then return text end
if not text then return 0 end
if string.byte(text, 3) ~= 1 or string.sub(text, 100, 115) ~= ARGV[1] then return 2 end
local clock = redis.pcall('TIME')
if clock.err then return clock end
redis.set_repl(redis.REPL_NONE)
redis.pcall('DEL', KEYS[2]) -- see exec_begin.lua
local written = redis.pcall('SET', KEYS[2], '', 'PX', 60000)
redis.pcall('DEL', KEYS[2])
return written.err and written or 1
