-- Keys that are held back. KEYS: lines of parts. ARGV: "" to read, or a filter (JSON: key, tenant, id) of those to try again.
-- Answers, for each part: the lines in JSON; or how many are tried again.
local filter = ARGV[1] ~= '' and cjson.decode(ARGV[1])
local found, count = {}, 0
for i, key in ipairs(KEYS) do
    if not filter then
        found[i] = redis.call('HVALS', key)
    else
        local all = redis.call('HGETALL', key)
        for j = 1, #all, 2 do
            local line = cjson.decode(all[j + 1])
            if not line['until'] and (not filter.key or filter.key == line.key) and (not filter.tenant or filter.tenant == line.tenant)
                and (not filter.id or filter.id == line.id) then
                line['until'], line.attempts, count = 0, 0, count + 1
                redis.call('HSET', key, all[j], cjson.encode(line))
            end
        end
    end
end
return filter and count or found
