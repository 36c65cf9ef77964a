-- A page of what waits in a part, for people: without bodies. It only reads. One slot.
-- KEYS: stream, due. ARGV: "ready" or "later", where to go on ("-" or an entry's number; a rank), how many.
-- Answers {next or "", then id, tenant, topic, key, created, due (ms, "" for now), size of the body for each}.
local found, count = {''}, tonumber(ARGV[3])
if ARGV[1] == 'ready' then
    local page = redis.call('XRANGE', KEYS[1], ARGV[2], '+', 'COUNT', count)
    for _, entry in ipairs(page) do
        local f = entry[2]
        for _, each in ipairs({f[2], f[4], f[6], f[8], f[20], '', #f[16]}) do found[#found + 1] = each end
    end
    if #page == count then found[1] = '(' .. page[#page][1] end
    return found
end
local page = redis.call('ZRANGE', KEYS[2], ARGV[2], ARGV[2] + count - 1, 'WITHSCORES')
for i = 1, #page, 2 do
    local m = cmsgpack.unpack(page[i])
    if #m == 10 then table.insert(m, 1, '') end  -- as it was written before it had a number
    for _, each in ipairs({m[2], m[3], m[4], m[5], m[11], page[i + 1], #m[9]}) do found[#found + 1] = each end
end
if #page == 2 * count then found[1] = string.format('%d', ARGV[2] + count) end
return found
