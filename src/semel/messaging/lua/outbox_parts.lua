-- Who owns what. KEYS: parts. ARGV: a relay whose parts are given back, or "".
-- Answers, for each part: epoch, owner ("" for nobody).
local found = {}
for i, key in ipairs(KEYS) do
    local part = redis.call('HMGET', key, 'epoch', 'owner')
    if ARGV[1] ~= '' and part[2] == ARGV[1] then redis.call('HDEL', key, 'owner') end
    found[2 * i - 1], found[2 * i] = part[1] or '0', part[2] or ''
end
return found
