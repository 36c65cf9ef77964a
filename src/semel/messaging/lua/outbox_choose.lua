-- Messages of a part that may be sent now, in their order. One slot.
-- KEYS: stream, due, seq, lines of the team, tenants. ARGV: after (a number), how many, how many are looked at, how many bytes, filter
-- (JSON, sets are {name: true}: skip, only, tenants; shut: names as `shut` below spells them; open: numbers; lines: whether keys are held back; free: names of lines
-- that flow again; held: keys that are held back besides, from which number on; both are on the page that is not written yet; of: one tenant only).
-- Answers {entries, next, held}: where to go on if the end was not reached, or ""; what is held back now (JSON, "" for nothing), which
-- is so for the pages behind this one too: a key that flows again between two of them would go on behind what was left out of the first.
-- Messages whose time has come are appended first: from then on they wait in line as if they were added now.
-- `tenants` knows a number for each tenant before which it has no message. Looking for one tenant's begins there, and tells it
-- how far it got: so one that is alone among many is found at once, and no message is looked at for it twice.
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
for _, packed in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 200)) do
    local m = cmsgpack.unpack(packed)
    if #m == 10 then table.insert(m, 1, '') end  -- as it was written before it had a number
    local ready = redis.call('ZSCORE', KEYS[2], packed)
    local seq = redis.call('INCR', KEYS[3])
    redis.call('XADD', KEYS[1], seq .. '-0', 'id', m[2], 'tenant', m[3], 'topic', m[4], 'key', m[5], 'type', m[6],
        'schema', m[7], 'headers', m[8], 'body', m[9], 'raw', m[10], 'created', m[11],
        'ready', string.format('%.6f', ready / 1000))
    redis.call('ZADD', KEYS[5], 'NX', seq, m[3])
    redis.call('ZREM', KEYS[2], packed)
end
local filter = cjson.decode(ARGV[5])
local held = filter.held
if filter.lines then
    local lines = redis.call('HGETALL', KEYS[4])
    for i = 1, #lines, 2 do
        local line = cjson.decode(lines[i + 1])
        if not (filter.free and filter.free[lines[i]]) and (not line['until'] or line['until'] * 1000 > now) then
            held = held or {}
            held[line.key and ('k' .. #line.tenant .. ':' .. line.tenant .. line.key) or ('s' .. string.format('%d', line.seq))] = line.seq
        end
    end
end
local after, left, looks, bytes = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local found = {}
local first
if filter.of then
    local known = redis.call('ZSCORE', KEYS[5], filter.of)
    if not known then return {found, '', ''} end
    after = string.format('%d', math.max(tonumber(known) - 1, tonumber(after)))
end
local function told(ended)
    if filter.of and first then
        redis.call('ZADD', KEYS[5], first, filter.of)
    elseif filter.of and ended then
        redis.call('ZREM', KEYS[5], filter.of)
    elseif filter.of then
        redis.call('ZADD', KEYS[5], after + 1, filter.of)
    end
    return {found, ended and '' or after, held and not ended and cjson.encode(held) or ''}
end
local function shut(f)
    local topic, tenant = #f[6] .. ':' .. f[6], #f[4] .. ':' .. f[4]
    return filter.shut[topic] or filter.shut['t' .. topic .. tenant] or filter.shut['k' .. topic .. f[8]]
        or filter.shut['tk' .. topic .. tenant .. f[8]]
end
local count, seen, size = 16, 0, 0  -- of a page: few at first, then as many as bodies of their size allow
while left > 0 and looks > 0 and bytes > 0 do
    local page = redis.call('XRANGE', KEYS[1], '(' .. after .. '-0', '+', 'COUNT', math.min(left + 50, looks, count))
    if #page == 0 then return told(true) end
    for _, entry in ipairs(page) do
        local f = entry[2]
        seen, size = seen + 1, size + #f[16] + 1
        local seq = string.match(entry[1], '^%d+')
        after, looks = seq, looks - 1
        if filter.of and f[4] == filter.of and not first then first = seq end
        local passes = not (filter.skip and filter.skip[f[6]]) and not (filter.only and not filter.only[f[6]])
            and not (filter.tenants and not filter.tenants[f[4]]) and not (filter.of and f[4] ~= filter.of) and not (filter.open and filter.open[seq])
        if passes and held then
            local from = held[f[8] ~= '' and ('k' .. #f[4] .. ':' .. f[4] .. f[8]) or ('s' .. seq)]
            passes = not from or tonumber(seq) < from
        end
        if passes and filter.shut then passes = not shut(f) end
        if passes then
            found[#found + 1] = entry
            left, bytes = left - 1, bytes - #f[16]
            if left == 0 or bytes <= 0 then return told(false) end
        end
    end
    count = math.max(1, math.min(500, math.floor(bytes * seen / size)))
end
return told(false)
