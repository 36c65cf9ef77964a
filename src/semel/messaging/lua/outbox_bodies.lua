-- Bodies that are kept elsewhere: which of them may go. One slot.
-- KEYS: times of those that are over, then the key of each body in question. ARGV: what is asked, then
--   over, how many: names of bodies whose messages were delivered and whose time is past.
--   doom: for each body 1 if no message refers to it, and none ever will: whoever watches its key cannot commit any more. Else 0.
--   reserve: somebody is about to store them, and cannot watch their keys. Who commits later than an hour after begins anew.
--   forget, then their names: they are removed.
-- A body's name is used once. So what was found here stays true, however late somebody acts on it.
if ARGV[1] == 'over' then
    local time = redis.call('TIME')
    return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', time[1] * 1000 + time[2] / 1000, 'LIMIT', 0, ARGV[2])
end
local found = {}
for i = 2, #KEYS do
    if ARGV[1] == 'reserve' then
        redis.call('SET', KEYS[i], 'reserved', 'PX', 3600000)
        found[i - 1] = 1
    elseif ARGV[1] == 'forget' then
        redis.call('DEL', KEYS[i])
        found[i - 1] = redis.call('ZREM', KEYS[1], ARGV[i])
    else
        local known = redis.call('GET', KEYS[i])
        if known == 'reserved' then known = false end
        if not known then redis.call('SET', KEYS[i], 'doomed', 'PX', 600000) end
        found[i - 1] = (not known or known == 'doomed') and 1 or 0
    end
end
return found
