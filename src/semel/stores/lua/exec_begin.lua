-- The first command in the EXEC of within(): note how many error replies the server has given so far.
--
-- KEYS  1 the note, beside the record; it is there until exec_end.lua has read it, so nobody else ever sees it
-- reply 0
--
-- Nothing here may fail: without a note exec_end.lua settles as it is told, and the replies are looked at afterwards.
redis.set_repl(redis.REPL_NONE) -- replicas and the log have no use for it
-- A server whose memory is full refuses no write of a script that has written. Before the count: forbidden, it is an error too.
redis.pcall('DEL', KEYS[1])
--@include errors
if count then redis.pcall('SET', KEYS[1], count, 'PX', 3600000) end
return 0
