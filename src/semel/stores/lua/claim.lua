-- Decide a claim: model.claim. One call per first execution, one per replay, which writes nothing.
--
-- KEYS  1 record   2 tombstone   3 index of open runs   4 counters      (one hash tag)
-- ARGV  1 the ask, packed: lease, retention, skew (doubles) | policy, fingerprint version, lengths of fingerprint,
--         nonce and takeover nonce, 1 if a large record may be sent | lengths of tenant, operation, key,
--         secret id, labels | nonce, fingerprint, tenant, operation, key, secret id, labels, takeover nonce
-- reply 8 bytes of the scope hash, the asker's nonce, then one letter and what belongs to it:
--       F won afresh: token, now, lease_until, expires     W won again or taken over: record
--       P replay: record      B busy: seconds left, attempts, 1 if delayed      M mismatch      E expired: until
--       U unknown: policy, record      X unreadable      L the record is large: ask again on the other connection
local LARGE = 65536
local ask = ARGV[1]
if #ask < 42 then return redis.error_reply('ERR semel: the ask is too short') end
local lease, retention, skew, ask_policy, ask_print_version, ask_print_size, ask_nonce_size, takeover_size, large,
  ask_tenant, ask_operation, ask_key, ask_secret, ask_labels = unpack('<dddBBBBBBHHHHI4', ask)
local labels_end = 42 + ask_nonce_size + ask_print_size + ask_tenant + ask_operation + ask_key + ask_secret + ask_labels
if #ask ~= labels_end + takeover_size or ask_policy > HOLD or not (lease >= 0 and lease < huge and retention >= 0) then
  return redis.error_reply('ERR semel: the ask is malformed')
end
local now = real + skew
local ask_nonce = sub(ask, 43, 42 + ask_nonce_size)
local echo = sub(KEYS[1], -32, -25) .. ask_nonce

--@include find

local again, kept_secret = false, nil -- the same run goes on; a secret id that stays
local print = ''
if text == nil then
  return echo .. 'X'
elseif seen == EXPIRED then
  return echo .. 'E' .. pack('<d', tombstone)
elseif not seen then
  if text and tombstone ~= 0 then redis.call('DEL', KEYS[2]) end
elseif state == RUNNING and nonce == ask_nonce then
  -- The same claim again: its reply was lost. Grant it again, with a full lease.
  local gone = policy == RETRY and now + lease + retention or huge
  text = sub(text, 1, 33) .. pack('<ddd', now, gone, now + lease) .. sub(text, 58)
  local milliseconds = ceil((gone - now + real) * 1000)
  if milliseconds < NEVER then
    local ends = string.format('%.0f', milliseconds)
    redis.call('ZADD', KEYS[3], ends, sub(KEYS[1], -32))
    redis.call('SET', KEYS[1], text, 'PXAT', ends)
  else
    redis.call('ZADD', KEYS[3], '+inf', sub(KEYS[1], -32))
    redis.call('SET', KEYS[1], text)
  end
  return echo .. 'W' .. text
elseif state == RELEASED and nonce == ask_nonce then
  -- A late copy of a claim that its caller has given up: granted, it would have no owner.
  return echo .. 'B' .. pack('<dI4B', 0, attempts, 0)
else
  -- Not bare, too: a take-over that was given back before it ran. The attempt before it may have had its effect.
  local bare = state == RELEASED and steps_size == 0 and (marker_size == 0 or attempts == 1)
  print = sub(text, print_at, names_at - 1)
  if ask_print_size > 0 and print_size > 0 and print_version == ask_print_version and not bare
    and print ~= sub(ask, 43 + ask_nonce_size, 42 + ask_nonce_size + ask_print_size) then
    return echo .. 'M'
  end
  if seen == DONE or seen == FAILED then
    if #text > LARGE and large == 0 then return echo .. 'L' end
    return echo .. 'P' .. text
  elseif seen == RELEASED then
    if now < not_before then return echo .. 'B' .. pack('<dI4B', not_before - now, attempts, 1) end
    if bare then
      kept_secret = sub(text, secret_at, secret_at + secret_size - 1) -- a downstream key in use never changes (R24)
    else
      again = true
    end
  elseif seen == RUNNING and now < lease_until then
    return echo .. 'B' .. pack('<dI4B', lease_until - now, attempts, 0)
  else
    -- The lease is over, or the outcome was declared unknown.
    local strict = max(policy, ask_policy)
    local cleared = takeover_size > 0 and policy ~= HOLD and sub(ask, labels_end + 1) == nonce
    if not cleared and not (state == RUNNING and strict == RETRY) then
      if #text > LARGE and large == 0 then return echo .. 'L' end
      return echo .. 'U' .. pack('<B', strict) .. text
    end
    again = true
  end
end

local under = again and max(policy, ask_policy) or ask_policy
local until_ = now + lease
local gone = under == RETRY and now + lease + retention or huge
local mark = math.floor(now * 1000000)
if token and token >= mark then mark = token + 1 end
local changed
if again then
  -- A new owner for the same run: steps, ids, labels, fingerprint and secret id stay; attempts count on.
  if print_size == 0 then
    print, print_version = sub(ask, 43 + ask_nonce_size, 42 + ask_nonce_size + ask_print_size), ask_print_version
  end
  changed = pack(HEAD, MAGIC, VERSION, RUNNING, under + WIDE, attempts + 1, print_version, #print, ask_nonce_size,
      tenant_size, operation_size, key_size, mark, created, now, gone)
    .. pack(REST, until_, noted, steps_size, 0, 0, ref_size, 0, secret_size, labels_size, 0)
    .. ask_nonce .. print .. sub(text, names_at, marker_at - 1)
    .. sub(text, secret_at, secret_at + secret_size + labels_size - 1) .. sub(text, steps_at, result_at - 1)
else
  local sizes, rest = sub(ask, 37, 42), sub(ask, 43, labels_end) -- of secret id and labels; all parts
  if kept_secret then
    sizes = pack('<HI4', #kept_secret, ask_labels)
    rest = sub(ask, 43, labels_end - ask_labels - ask_secret) .. kept_secret .. sub(ask, labels_end + 1 - ask_labels, labels_end)
  end
  changed = pack('<BBBBI4', MAGIC, VERSION, RUNNING, under + WIDE, 1) .. sub(ask, 26, 28) .. sub(ask, 31, 36)
    .. pack('<I8dddd', mark, now, now, gone, until_) .. BARE .. sizes .. '\0\0\0\0' .. rest
end

-- The index first: an entry without a record is swept away, a run without an entry would never be found.
-- Fresh claims are not counted: their ends are, and the open ones are in the index. A count costs as much as the SET.
if again then redis.call('HINCRBY', KEYS[4], 'taken_over', 1) end
local milliseconds = ceil((gone - now + real) * 1000)
if milliseconds < NEVER then
  local ends = string.format('%.0f', milliseconds)
  redis.call('ZADD', KEYS[3], ends, sub(KEYS[1], -32))
  redis.call('SET', KEYS[1], changed, 'PXAT', ends)
else
  redis.call('ZADD', KEYS[3], '+inf', sub(KEYS[1], -32))
  redis.call('SET', KEYS[1], changed)
end
-- Last: a server whose memory is full refuses no write of a script that has written something already.
if clock[2] % 16 == 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', string.format('%.0f', real * 1000))
end
if again or kept_secret then return echo .. 'W' .. changed end
return echo .. 'F' .. pack('<I8ddd', mark, now, until_, gone)
