-- The last command in the EXEC of within(): settle the record, as unknown if a command before it was answered with an error.
--
-- KEYS  1 to 5 those of settle.lua   6 the note of exec_begin.lua
-- ARGV  1, 2 those of settle.lua if all went well   3, 4 if not
-- reply 0 settled as if all went well   1 as if not; an error of settle.lua
--
-- An EXEC tells nobody inside of it how its other commands were answered, but the server counts its error replies, and from the
-- first command to this one it answers nobody else. It also counts what a script among the commands has caught (pcall): such
-- an EXEC is settled as if it had failed, and its sender, who sees the replies, puts that right.
local noted, failed = redis.pcall('GET', KEYS[6]), false
if type(noted) == 'string' and #noted > 16 then
--@include errors
  failed = count ~= string.sub(noted, 17)
end
local ARGV = failed and {ARGV[3], ARGV[4]} or ARGV
local function settle()
--@include record
--@include settle
end
local well, reply = pcall(settle)
if not well or type(reply) == 'table' then
  -- The commands are applied on the replicas and in the log: so is the note, or they would be applied again after a failover.
  redis.set_repl(redis.REPL_ALL)
  if type(noted) == 'string' then redis.pcall('SET', KEYS[6], noted, 'PX', 604800000) end
  if type(reply) == 'table' then return reply end
  return redis.error_reply(string.find(reply, '^%u+ ') and reply or 'ERR ' .. reply) -- what was raised is text, with its code
end
redis.set_repl(redis.REPL_NONE)
-- Who may not delete may write: one that stayed would be taken for that of a settle that failed.
if type(redis.pcall('DEL', KEYS[6])) == 'table' then redis.pcall('SET', KEYS[6], '', 'PX', 1) end
-- The reply of settle.lua has a nonce and a hash; a client with decode_responses=True could not read it.
return failed and 1 or 0
