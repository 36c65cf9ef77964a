-- Before the EXEC of within(), on the connection that watches the record: what is there, where the EXEC will be applied.
--
-- KEYS  1 the record
-- ARGV  1 the nonce of the run
-- reply 0 nothing   1 it runs under this nonce, or only the settle can say   2 anything else
--
-- Layout: see record.lua (the state is the third byte; the nonce of a run comes after its wide block). GET and EVAL are what the settle
-- needs as well; a user who may not is told by that.
local text = redis.pcall('GET', KEYS[1])
if type(text) == 'table' then return 1 end
return not text and 0 or string.byte(text, 3) == 1 and string.sub(text, 100, 115) == ARGV[1] and 1 or 2
