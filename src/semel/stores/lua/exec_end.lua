-- The last command in the EXEC of within(): settle the record, as unknown if a command before it was answered with an error.
--
-- KEYS  1 to 5 those of settle.lua   6 the note of exec_begin.lua
-- ARGV  1, 2 those of settle.lua if all went well   3, 4 if not
-- reply 0 settled as if all went well   1 as if not; an error of settle.lua, and what has become of the record
--
-- An EXEC tells nobody inside of it how its other commands were answered, but the server counts its error replies, and from the
-- first command to this one it answers nobody else. It also counts what a script among the commands has caught (pcall): such
-- an EXEC is settled as if it had failed, and its sender, who sees the replies, puts that right.
redis.set_repl(redis.REPL_NONE)
local noted, failed = redis.pcall('GETDEL', KEYS[6]), false
redis.set_repl(redis.REPL_ALL)
if type(noted) == 'string' then
--@include errors
  failed = count ~= noted
end
local function settle(redis, ARGV)
--@include record
--@include settle
end
local well, reply = pcall(settle, redis, failed and {ARGV[3], ARGV[4]} or ARGV)
-- The reply of settle.lua has a nonce and a hash; a client with decode_responses=True could not read it.
if type(reply) == 'string' and string.sub(reply, -1) == 'O' then return failed and 1 or 0 end
if well and type(reply) == 'string' then return redis.error_reply('ERR semel: a command of this EXEC has changed its record') end

-- An index, a count, or memory: the commands before this one are applied all the same. Whoever looks at the record must see that,
-- although the sender is dead or has not heard the answer, and an EXEC that was sent once more is to be aborted. So the record is
-- made unknown, whatever else can be written: exec_seen.lua has seen to it that the record itself can be.
redis.pcall('ZREM', KEYS[3], '') -- see exec_begin.lua
local best = {call = redis.pcall, pcall = redis.pcall, error_reply = redis.error_reply, sha1hex = redis.sha1hex}
local held, answer = pcall(settle, best, {ARGV[3], ARGV[4]})
answer = held and type(answer) == 'string' and string.sub(answer, -1)
if answer == 'R' then return failed and 1 or 0 end -- what failed was left to do after the record was written
local text = type(reply) == 'table' and reply.err or reply -- what was raised is text before Redis 7
if not string.find(text, '^%u+ ') then text = 'ERR ' .. text end
return redis.error_reply(answer == 'O' and text .. ' (the record is unknown now)' or text)
