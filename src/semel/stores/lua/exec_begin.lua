-- The first command in the EXEC of within(): note whose it is, and how many error replies the server has given so far.
--
-- KEYS  1 the note, beside the record; it is there until exec_end.lua has settled, or somebody has said what became of it (settle.lua)
-- ARGV  1 the nonce of the run
-- reply 0
--
-- Nothing here may fail: without a note exec_end.lua settles as it is told, and the replies are looked at afterwards. One that stays
-- says that the commands were applied and the settle was not: should nobody hear the answer, they are not sent again, nor by whoever
-- takes the key over (exec_seen.lua).
redis.set_repl(redis.REPL_NONE) -- replicas and the log have no use for it
-- A server whose memory is full refuses no write of a script that has written. Before the count: forbidden, it is an error too.
redis.pcall('DEL', KEYS[1])
--@include errors
redis.pcall('SET', KEYS[1], ARGV[1] .. (count or ''), 'PX', 604800000)
return 0
