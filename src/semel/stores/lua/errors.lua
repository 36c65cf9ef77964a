-- How many error replies the server has given since it started, those to commands of this very EXEC included.
-- out  count, as text; nil where the server does not tell (an ACL without INFO)
local count = redis.pcall('INFO', 'stats')
local found = type(count) == 'string' and string.find(count, 'total_error_replies:', 1, true)
count = found and string.match(count, '^%d+', found + 20) or nil
