-- Own a part from now on, under its next epoch. KEYS: part. ARGV: token, relay, the epoch that was seen.
-- Answers {1, state}, or {0} if somebody was quicker. A token that was seen is answered again: the answer was lost.
local part = redis.call('HMGET', KEYS[1], 'epoch', 'token', 'state')
local state = part[3] or '{}'
if part[2] == ARGV[1] then return {1, state} end
if (part[1] or '0') ~= ARGV[3] then return {0} end
redis.call('HSET', KEYS[1], 'epoch', string.format('%d', tonumber(ARGV[3]) + 1), 'owner', ARGV[2], 'token', ARGV[1], 'state', state)
return {1, state}
