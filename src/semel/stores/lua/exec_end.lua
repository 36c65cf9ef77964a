-- The last command in the EXEC of within(): settle the record, as unknown if a command before it was answered with an error.
--
-- KEYS  1 to 5 those of settle.lua   6 the note of exec_begin.lua
-- ARGV  1, 2 those of settle.lua if all went well   3, 4 if not
-- reply 0 settled as if all went well   1 as if not; an error, with what has become of the record where that is known
--
-- An EXEC tells nobody inside of it how its other commands were answered, but the server counts its error replies, and from the
-- first command to this one it answers nobody else. It also counts what a script among the commands has caught (pcall): such
-- an EXEC is settled as if it had failed, and its sender, who sees the replies, puts that right.
redis.set_repl(redis.REPL_NONE)
local noted, failed = redis.pcall('GET', KEYS[6]), false
if type(noted) == 'string' and noted ~= '' then -- what exec_seen.lua wrote is no count
--@include errors
  failed = count ~= noted
end
-- After the count: what is forbidden is an error, too. Who may not delete may write. And a server that is full refuses nothing of a
-- script that has written.
if type(redis.pcall('DEL', KEYS[6])) == 'table' then redis.pcall('SET', KEYS[6], '', 'PX', 1) end
redis.set_repl(redis.REPL_ALL)
local function settle(redis, ARGV)
--@include record
--@include settle
end
local function said(well, reply)
  return well and type(reply) == 'string' and string.sub(reply, -1) -- the rest could not be read with decode_responses=True
end
local well, reply = pcall(settle, redis, failed and {ARGV[3], ARGV[4]} or ARGV)
local answer = said(well, reply)
if answer == 'O' then return failed and 1 or 0 end
if answer then return redis.error_reply('ERR semel: the record has ended, or a command of this EXEC has changed it') end

-- An index, a count, or memory: the commands before this one are applied all the same. Whoever looks at the record must see that,
-- although the sender is dead or has not heard the answer, and an EXEC that was sent once more is to be aborted. So the record is
-- made unknown, whatever else can be written (exec_seen.lua has just looked whether the record can).
answer = said(pcall(settle, {call = redis.pcall, pcall = redis.pcall, error_reply = redis.error_reply, sha1hex = redis.sha1hex},
  {ARGV[3], ARGV[4]}))
-- What failed was left to do after the record was written: it says so, or has ended with its retention.
if answer == 'R' or answer == 'G' then return failed and 1 or 0 end
local text = type(reply) == 'table' and reply.err or reply -- what was raised is text before Redis 7
if not string.find(text, '^%u+ ') then text = 'ERR ' .. text end
local record = redis.pcall('GET', KEYS[1]) -- no write of these has told whether it was taken
local unknown = answer == 'O' and type(record) == 'string' and string.byte(record, 3) == 4
return redis.error_reply(unknown and text .. ' (the record is unknown now)' or text)
