-- How many messages wait, by topic. KEYS: counts. Answers, for each: topic, number, topic, number, …
local found = {}
for i, key in ipairs(KEYS) do found[i] = redis.call('HGETALL', key) end
return found
