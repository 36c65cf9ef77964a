-- Messages by number. KEYS: stream. ARGV: numbers.
local found = {}
for _, seq in ipairs(ARGV) do
    local entry = redis.call('XRANGE', KEYS[1], seq .. '-0', seq .. '-0')[1]
    if entry then found[#found + 1] = entry end
end
return found
