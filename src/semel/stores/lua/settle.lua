-- Decide a settle: model.settle. Fenced by the nonce; sent twice, it is stored once.
--
-- KEYS  1 record   2 tombstone   3 index of open runs   4 index of failures   5 counters   6 audit trail (with an actor)
--       (one hash tag; the ref index, if wanted, is derived from it: <tag>:i:<SHA-1 of the ref>)
-- ARGV  1 the end, packed: retention, tombstone, after, skew (doubles) | kind (as the states; 7: forgotten),
--         policy (255: as it is), options (1 repair, 2 new steps, 4 index the ref, 8 noted), lengths of nonce and new nonce |
--         lengths of marker, ref (65535: none), tenant, operation, key, actor | lengths of error, steps, reason |
--         nonce, new nonce, marker, ref, error, steps, tenant, operation, key, actor, reason |
--         with the option 8: when the last note was taken that the steps were made of (a double)
--       2 the result
-- reply 8 bytes of the scope hash, the sender's nonce (the new one, if there is one), one letter:
--       O ok   L lost   G gone   R refused   X unreadable
local FORGOTTEN = 7
-- From the kind on: an owner's result, and nothing else to say, under a nonce of 16 bytes.
local PLAIN = '\2\255\0\16\0\0\0\255\255\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0'
local ending, result = ARGV[1], ARGV[2]
--@include quick
if #ending < 61 then return redis.error_reply('ERR semel: the end is too short') end
local retention, keep_known, after, skew, kind, new_policy, options, end_nonce_size, new_nonce_size,
  end_marker, end_ref, end_tenant, end_operation, end_key, end_actor, end_error, end_steps, end_reason
  = unpack('<ddddBBBBBHHHHHHI4I4I4', ending)
local end_marker_at = 62 + end_nonce_size + new_nonce_size
local end_ref_at = end_marker_at + end_marker
local end_error_at = end_ref == NO_REF and end_ref_at or end_ref_at + end_ref
local end_steps_at = end_error_at + end_error
local end_names_at = end_steps_at + end_steps
local end_actor_at = end_names_at + end_tenant + end_operation + end_key
local end_noted_at = end_actor_at + end_actor + end_reason
if not result or #ending ~= end_noted_at - 1 + (band(options, 8) ~= 0 and 8 or 0)
  or kind < DONE or kind > FORGOTTEN or kind == EXPIRED or (new_policy > HOLD and new_policy ~= 255)
  or not (retention >= 0 and keep_known >= 0 and after >= 0 and after < huge) or (end_actor > 0 and not KEYS[6]) then
  return redis.error_reply('ERR semel: the end is malformed')
end
local now = real + skew
local hash = sub(KEYS[1], -32)
local end_nonce = sub(ending, 62, 61 + end_nonce_size)
local new_nonce = new_nonce_size > 0 and sub(ending, 62 + end_nonce_size, end_marker_at - 1)
local echo = sub(hash, 1, 8) .. (new_nonce or end_nonce)

--@include find

local damaged = text == nil
if damaged then
  -- Only a person's word replaces what cannot be read (R15), never an owner whose claim cannot be seen in it.
  if kind ~= FORGOTTEN and band(options, 1) == 0 and not new_nonce then return echo .. 'X' end
  state, seen, policy, flags, attempts, token, created, noted = UNKNOWN, UNKNOWN, HOLD, 0, 0, 0, now, 0
  print_version, print_size, nonce, text = 1, 0, end_nonce, sub(ending, end_names_at, end_actor_at - 1)
  tenant_size, operation_size, key_size = end_tenant, end_operation, end_key
  ref_size, secret_size, labels_size, steps_size = NO_REF, 0, 0, 0
  print_at, names_at, ref_at, marker_at, secret_at, steps_at, result_at = 1, 1, #text + 1, 1, 1, 1, 1
  tombstone = -1 -- remove whatever lies there
end

if kind == FORGOTTEN then
  if not seen then return echo .. 'O' end -- there is nothing, or it has ended by time
  -- The record that was looked at is gone: sent again, or late, this meets one that was made since.
  if end_nonce_size > 0 and nonce ~= end_nonce then return echo .. 'L' end
  if seen == RUNNING and now < lease_until then return echo .. 'R' end
elseif not seen or seen == EXPIRED then
  return echo .. 'G'
elseif new_nonce then
  -- A person or a probe speaks: only on unknown or failed records and lapsed runs, and only once (R13).
  if nonce == new_nonce then return echo .. 'O' end
  if end_nonce_size > 0 and nonce ~= end_nonce then return echo .. 'L' end
  -- The late owner has noted another step since the new steps were made: it must not be lost.
  if band(options, 8) ~= 0 and unpack('<d', ending, end_noted_at) ~= noted then return echo .. 'L' end
  -- Whoever speaks was asked because a caller's policy is the stricter one: for it, a lapsed run under retry is unknown.
  local live = seen == RUNNING and now < lease_until
  local repairs = band(options, 1) ~= 0 and not live
  local allowed = kind ~= UNKNOWN and not live and (seen == RUNNING or seen == UNKNOWN or seen == FAILED)
    and band(flags, RESOLVED) == 0
  if not repairs and not allowed then return echo .. 'R' end
elseif nonce ~= end_nonce then
  return echo .. 'L'
elseif state ~= RUNNING and state ~= UNKNOWN then
  -- Settled already under this very nonce: fine if the same settle was sent again because its reply was lost.
  return echo .. (state == kind and 'O' or 'R')
end

-- Accepted. What can fail (memory, a foreign value under one of our names) comes before the record, the commit.
-- What frees memory is not refused for want of it: a server that is full refuses no write of a script that has written, and
-- this one takes away what is nowhere. To delete the record first would do as well, and lose it should the rest fail.
if kind == FORGOTTEN or kind == RELEASED then redis.call('ZREM', KEYS[3], '') end
redis.call('HINCRBY', KEYS[5], kind == DONE and 'done' or kind == FAILED and 'failed' or kind == UNKNOWN and 'unknown'
  or kind == RELEASED and 'released' or 'forgotten', 1)
if end_actor > 0 then
  -- A line: until when it is kept, when, kind, viewed state (0: none), attempt, lengths of actor and reason, both.
  local lived, kept = redis.call('PTTL', KEYS[6]), now + retention
  redis.call('RPUSH', KEYS[6], pack('<ddBBI4HI4', kept, now, kind, seen or 0, attempts, end_actor, end_reason)
    .. sub(ending, end_actor_at, end_noted_at - 1))
  -- Readers go by `kept` of the youngest line. The list lives a minute longer: as in the other stores, a line that
  -- has just ended is told again when the next one comes.
  local milliseconds = ceil((kept - now + real + 60) * 1000)
  if milliseconds >= NEVER then
    redis.call('PERSIST', KEYS[6])
  elseif lived == -2 then
    redis.call('PEXPIREAT', KEYS[6], string.format('%.0f', milliseconds))
  elseif lived >= 0 then
    redis.call('PEXPIREAT', KEYS[6], string.format('%.0f', milliseconds), 'GT')
  end
end

if kind == FORGOTTEN then
  if ref_size ~= NO_REF then -- whoever settled it may have indexed it; that of an unknown record ends by no time
    redis.call('ZREM', sub(KEYS[1], 1, -35) .. 'i:' .. redis.sha1hex(sub(text, ref_at, marker_at - 1)), hash)
  end
  redis.call('DEL', KEYS[1], KEYS[2])
  redis.call('ZREM', KEYS[3], hash)
  redis.call('ZREM', KEYS[4], hash)
else
  -- model._settled: nonce, fingerprint and names, then what is new, then what stays.
  local owner, final = nonce, new_policy == 255 and policy or new_policy
  if new_nonce then
    owner = new_nonce
    if end_actor > 0 then final = final + RESOLVED end
  elseif band(flags, RESOLVED) ~= 0 then
    final = final + RESOLVED
  end
  local ref, steps
  if end_ref == NO_REF then
    end_ref, ref = ref_size, sub(text, ref_at, marker_at - 1)
  else
    ref = sub(ending, end_ref_at, end_error_at - 1)
  end
  if band(options, 2) == 0 then
    end_steps, steps = steps_size, sub(text, steps_at, result_at - 1)
  else
    steps = sub(ending, end_steps_at, end_names_at - 1)
  end
  local not_until, gone, known = after > 0 and now + after or 0, huge, 0
  if kind == RELEASED and end_steps > 0 then
    -- model._kept_with_steps: one retention after the last of them (R14), or after the next one may try.
    local free = max(now, not_until)
    gone = noted + retention
    if gone <= free then gone = free + retention end
  elseif kind ~= UNKNOWN then
    gone = max(now + retention, not_until)
  end
  if keep_known > 0 and gone < huge and (kind == DONE or kind == FAILED) then known = gone + keep_known end
  local same = owner .. sub(text, print_at, ref_at - 1)
  local milliseconds = max(1, ceil((gone - now + real) * 1000)) -- Redis takes no moment before 1970
  local ends = milliseconds < NEVER and string.format('%.0f', milliseconds) or '+inf'

  if kind == FAILED then
    redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', string.format('%.0f', real * 1000))
    redis.call('ZADD', KEYS[4], ends, hash)
  elseif kind == UNKNOWN then
    redis.call('ZADD', KEYS[3], '+inf', hash)
  end
  local indexed = end_ref ~= NO_REF and band(options, 4) ~= 0 and ref
  -- Who decides need not index; but what was indexed while the record was unknown has no end yet, and gets the record's.
  local before = state == UNKNOWN and ref_size ~= NO_REF and sub(text, ref_at, marker_at - 1)
  if indexed or before then
    for _, name in ipairs({indexed or before, indexed ~= before and indexed and before or nil}) do
      local refs = sub(KEYS[1], 1, -35) .. 'i:' .. redis.sha1hex(name)
      redis.call('ZREMRANGEBYSCORE', refs, '-inf', string.format('%.0f', real * 1000))
      if name == indexed then
        redis.call('ZADD', refs, ends, hash)
      else
        redis.call('ZADD', refs, 'XX', ends, hash)
      end
      local last = tonumber(redis.call('ZRANGE', refs, -1, -1, 'WITHSCORES')[2] or huge)
      if last < NEVER then
        redis.call('PEXPIREAT', refs, string.format('%.0f', last))
      else
        redis.call('PERSIST', refs)
      end
    end
  end

  if known ~= 0 then
    -- What a tombstone keeps: that the key was used, by how many attempts and when (R19, model.bury).
    local stone = pack(HEAD, MAGIC, VERSION, kind, final + BURIED + WIDE, attempts, print_version, print_size, #owner,
        tenant_size, operation_size, key_size, token, created, now, gone)
      .. pack(REST, now, noted, 0, known, not_until, NO_REF, 0, secret_size, 0, 0)
      .. same .. sub(text, secret_at, secret_at + secret_size - 1)
    local stays = ceil((known - now + real) * 1000)
    if stays < NEVER then
      redis.call('SET', KEYS[2], stone, 'PXAT', string.format('%.0f', stays))
    else
      redis.call('SET', KEYS[2], stone)
    end
  elseif tombstone ~= 0 then
    redis.call('DEL', KEYS[2])
  end

  local wide = known ~= 0 or not_until ~= 0 or noted ~= 0 or end_steps > 0 or end_ref ~= NO_REF or end_marker > 0
    or end_error > 0 or secret_size > 0 or labels_size > 0
  local changed = pack(HEAD, MAGIC, VERSION, kind, wide and final + WIDE or final, attempts, print_version, print_size,
    #owner, tenant_size, operation_size, key_size, token, created, now, gone)
  if wide then
    changed = changed
      .. pack(REST, now, noted, end_steps, known, not_until, end_ref, end_marker, secret_size, labels_size, end_error)
      .. same .. ref .. sub(ending, end_marker_at, end_ref_at - 1)
      .. sub(text, secret_at, secret_at + secret_size + labels_size - 1)
      .. sub(ending, end_error_at, end_steps_at - 1) .. steps .. result
  else
    changed = changed .. same .. result
  end
  if milliseconds < NEVER then
    redis.call('SET', KEYS[1], changed, 'PXAT', ends)
  else
    redis.call('SET', KEYS[1], changed)
  end
  if kind ~= UNKNOWN then redis.call('ZREM', KEYS[3], hash) end
  if (state == FAILED or damaged) and kind ~= FAILED then redis.call('ZREM', KEYS[4], hash) end
end

-- Waiters also look by themselves: a server that forbids this user to publish must not undo a stored outcome.
redis.pcall('SPUBLISH', KEYS[1], '')
return echo .. 'O'
