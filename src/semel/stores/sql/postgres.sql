-- The statements of the PostgreSQL store, one per `-- name:`. Read by postgres_sql.py.
--
-- Rules of this file
-- 1. Every verb is ONE statement in a transaction of its own: nothing is held while the client thinks, so a paused
--    client blocks nobody, and a transaction pooler (PgBouncer) may sit in between. No statement leaves session state.
-- 2. Time is the server's, one moment per statement (`clock`, or {moment}). Columns are real timestamps; statements take
--    and give float seconds. NULL means never, or not set. $1 is always the shift that tests use to move the clock
--    (else 0).
-- 3. Who writes waits at most 50 ms for a row (`lock_timeout`, set for this transaction only: set_config(…, true));
--    then PostgreSQL raises 55P03, which the store answers with "busy" or by splitting the batch.
-- 4. Where several rows are written they are locked in the order of their scope, so that no two batches deadlock.
-- 5. `xmin` is a row's version: a decision that Python took on a row it read is written only if the row is still
--    that version (`swap`, `forget`). No lock is held between reading and writing.
--
-- {records} {audit} {schema}  the quoted table names    {begin} {begin_all} {enter} {pkey}  three functions, the records' primary key
-- {name}  the plain table name, also the NOTIFY channel
-- {row} {row:r}  all columns of a record, times as seconds    {names:held}  their names
-- {nulls}  NULL for each of them but the scope
-- {filter} {viewed} {buriable} {readable} {running} {moment}  the parts of these names    {labels}  a regular expression
-- {print}  the version of fingerprints
--
-- Every parameter costs the client and the server a microsecond, every expression the server about half of one. So the
-- claim and the settle that nearly all calls are have statements of their own (claim_plain, claim_new, settle_done, batches),
-- which take what differs from call to call, and no shift of the clock. A claim's time is read after its snapshot was taken
-- (`clock_timestamp`): the time of its arrival may lie before the end of a run that it sees.

-- name: claim_one
-- Read first: a key that is there is only read (no write, no WAL, no transaction id); one that is not is inserted by
-- the function {begin}. An INSERT in the statement itself would open every index of the table for each replay too,
-- which costs as much again as the read.
-- $2 scope $3 tenant $4 operation $5 key $6 nonce $7 policy $8 fingerprint $9 its version $10 lease $11 life or NULL
-- $12 labels $13 secret id
-- One row: now, inserted (NULL: was there), version (NULL: was not there), waited, the record. Neither inserted nor
-- version: somebody inserted it between our snapshot and our insert; ask again.
select date_part('epoch', clock.now),
       case when r.version is null then
           {begin}($2::bytea, $3::text, $4::text, $5::text, $6::bytea, $7::text, $8::bytea, $9::integer, $10::float8,
                   $11::float8, $12::text, $13::text, clock.now)
       end,
       r.*
from (select clock_timestamp() + make_interval(secs => $1::float8) as now) clock
left join (select xmin::text as version, waited, {row} from {records} where scope = $2::bytea) r on true

-- name: claim_plain
-- claim_one for an ask under `retry`, without labels and secret id, at the server's own time.
-- $1 scope $2 tenant $3 operation $4 key $5 nonce $6 fingerprint $7 lease $8 life or NULL. The row of claim_one.
select date_part('epoch', clock.now),
       case when r.scope is null then
           {begin}($1::bytea, $2::text, $3::text, $4::text, $5::bytea, 'retry', $6::bytea, {print}, $7::float8,
                   $8::float8, null, null, clock.now)
       end,
       r.xmin::text, r.waited, {row:r}
from (select clock_timestamp() as now) clock left join {records} r on r.scope = $1::bytea

-- name: claim_new
-- claim_plain without the look, for a key that is most likely new (see hunch.py). One row: now, and whether it was inserted;
-- if not it is there, ask claim_plain: nothing was written. Not the INSERT itself, which would lock the table before any part
-- of it can set lock_timeout, and wait without end for an index that is being made.
-- $1-$8 of claim_plain.
select date_part('epoch', clock.now),
       {begin}($1::bytea, $2::text, $3::text, $4::text, $5::bytea, 'retry', $6::bytea, {print}, $7::float8, $8::float8, null,
               null, clock.now)
from (select clock_timestamp() as now) clock

-- name: claim_many
-- As claim_one, with arrays for $2-$13, sorted by scope, each scope once. One row per scope that is there, in any order:
-- now, NULL, version, waited, the record; and one with all scopes that were inserted ($14: none is, to look only). A scope
-- without either: ask again. The insertion is a function's ({begin_all}), as claim_one's is: outcomes are read although
-- nothing can be inserted, and no statement waits without end for the table.
-- The lateral join with its `offset 0` makes one look-up by key per scope the only plan there is. Left to choose, the
-- planner reads the whole table while it is small, and stays with that plan when it has grown.
with clock as materialized (
    select clock_timestamp() + make_interval(secs => $1::float8) as now
), held as materialized (
    select r.*
    from unnest($2::bytea[]) as asked(scope)
    cross join lateral (
        select r.xmin::text as version, r.waited, {row:r} from {records} r where r.scope = asked.scope offset 0
    ) r
), fresh as (
    select {begin_all}(array_agg(a.scope), array_agg(a.tenant), array_agg(a.operation), array_agg(a.key), array_agg(a.nonce),
                       array_agg(a.policy), array_agg(a.fingerprint), array_agg(a.fingerprint_version), array_agg(a.lease),
                       array_agg(a.life), array_agg(a.labels), array_agg(a.secret_id), (select now from clock)) as scopes
    from unnest($2::bytea[], $3::text[], $4::text[], $5::text[], $6::bytea[], $7::text[], $8::bytea[], $9::integer[],
                $10::float8[], $11::float8[], $12::text[], $13::text[])
         as a(scope, tenant, operation, key, nonce, policy, fingerprint, fingerprint_version, lease, life, labels,
              secret_id)
    where not $14::boolean and not exists (select from held where held.scope = a.scope)
    having count(*) > 0
)
select date_part('epoch', clock.now), null::bytea[], held.version, held.waited, {names:held}
from clock cross join held
union all
select date_part('epoch', clock.now), fresh.scopes, null, null, null, {nulls}
from clock cross join fresh

-- name: claim_plain_many
-- As claim_plain, with arrays, as claim_many ($9: to look only).
with clock as materialized (
    select clock_timestamp() as now
), held as materialized (
    select r.*
    from unnest($1::bytea[]) as asked(scope)
    cross join lateral (
        select r.xmin::text as version, r.waited, {row:r} from {records} r where r.scope = asked.scope offset 0
    ) r
), fresh as (
    select {begin_all}(array_agg(a.scope), array_agg(a.tenant), array_agg(a.operation), array_agg(a.key), array_agg(a.nonce),
                       null, array_agg(a.fingerprint), null, array_agg(a.lease), array_agg(a.life), null, null,
                       (select now from clock)) as scopes
    from unnest($1::bytea[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::bytea[], $7::float8[], $8::float8[])
         as a(scope, tenant, operation, key, nonce, fingerprint, lease, life)
    where not $9::boolean and not exists (select from held where held.scope = a.scope)
    having count(*) > 0
)
select date_part('epoch', clock.now), null::bytea[], held.version, held.waited, {names:held}
from clock cross join held
union all
select date_part('epoch', clock.now), fresh.scopes, null, null, null, {nulls}
from clock cross join fresh

-- name: claim_new_many
-- As claim_new, with arrays, as claim_plain_many. One row: now, and all scopes that are ours (NULL: none). The others are
-- there, ask claim_plain_many; nothing was written for them.
select date_part('epoch', clock.now),
       {begin_all}($1::bytea[], $2::text[], $3::text[], $4::text[], $5::bytea[], null, $6::bytea[], null, $7::float8[],
                   $8::float8[], null, null, clock.now)
from (select clock_timestamp() as now) clock

-- name: settle_one
-- The owner's settle of a run that is still its own: the common case, by conditions alone. Everything else (somebody
-- else's nonce, not running, an actor, a release that keeps steps) matches no row here and is decided by the model.
-- $2 scope $3 nonce $4 kind $5 keep: seconds until expiry or NULL $6 seconds until the tombstone ends or NULL
-- $7 seconds until it may be tried again or NULL $8 policy or NULL $9 marker $10 result $11 ref $12 error type
-- $13 error code $14 error message $15 steps (NULL: keep them)
-- One row if it was accepted. Whoever waits in another process is told.
update {records} r
set state = $4::text, updated = {moment}, settled = {moment}, lease_until = {moment},
    expires = {moment} + make_interval(secs => $5::float8),
    tombstone = {moment} + make_interval(secs => $6::float8),
    not_before = {moment} + make_interval(secs => $7::float8),
    policy = coalesce($8::text, r.policy), marker = $9::text, result = $10::bytea, ref = coalesce($11::text, r.ref),
    error_type = $12::text, error_code = $13::text, error_message = $14::text,
    steps = nullif(coalesce($15::bytea, r.steps), '')
where r.scope = $2::bytea and r.nonce = $3::bytea and {running}
  and (r.policy <> 'retry' or r.expires is null or r.expires > {moment})
  and ($4::text <> 'released' or r.steps is null)
  and set_config('lock_timeout', '50ms', true) is not null
returning case when r.waited then pg_notify('{name}', encode(r.scope, 'hex')) is not null end

-- name: settle_done
-- settle_one for an outcome without ref, marker, steps and tombstone, at the server's own time.
-- $1 scope $2 nonce $3 keep: seconds until expiry or NULL $4 result
update {records} r
set state = 'done', updated = statement_timestamp(), settled = statement_timestamp(),
    lease_until = statement_timestamp(), expires = statement_timestamp() + make_interval(secs => $3::float8),
    tombstone = null, not_before = null, marker = null, result = $4::bytea, error_type = null, error_code = null,
    error_message = null
where r.scope = $1::bytea and r.nonce = $2::bytea and {running}
  and (r.policy <> 'retry' or r.expires is null or r.expires > statement_timestamp())
  and set_config('lock_timeout', '50ms', true) is not null
returning case when r.waited then pg_notify('{name}', encode(r.scope, 'hex')) is not null end

-- name: settle_many
-- As settle_one, with arrays for $2-$15, sorted by scope, each scope once. One row (its position) per accepted item.
-- Rows are locked in order, one by one (as in claim_many there is no other plan), and one that somebody else has locked
-- is left out (and then settled alone): a batch of settles waits for nobody. What is locked is found again by its
-- place, not by its key; `held.scope = ends.scope` says nothing new but makes the planner expect few of them.
with clock as materialized (
    select clock_timestamp() + make_interval(secs => $1::float8) as now
), e as materialized (
    select ends.*, held.place
    from clock
    cross join unnest($2::bytea[], $3::bytea[], $4::text[], $5::float8[], $6::float8[], $7::float8[], $8::text[],
                      $9::text[], $10::bytea[], $11::text[], $12::text[], $13::text[], $14::text[], $15::bytea[])
        with ordinality as ends(scope, nonce, kind, keep, tombstone, after, policy, marker, result, ref, error_type,
                                error_code, error_message, steps, position)
    cross join lateral (
        select r.ctid as place, r.scope from {records} r
        where r.scope = ends.scope and r.nonce = ends.nonce and {running}
          and (r.policy <> 'retry' or r.expires is null or r.expires > now)
          and (ends.kind <> 'released' or r.steps is null)
        for update skip locked
    ) held
    where held.scope = ends.scope
)
update {records} r
set state = e.kind, updated = now, settled = now, lease_until = now,
    expires = to_timestamp(date_part('epoch', now) + e.keep),
    tombstone = to_timestamp(date_part('epoch', now) + e.tombstone),
    not_before = to_timestamp(date_part('epoch', now) + e.after),
    policy = coalesce(e.policy, r.policy), marker = e.marker, result = e.result, ref = coalesce(e.ref, r.ref),
    error_type = e.error_type, error_code = e.error_code, error_message = e.error_message,
    steps = nullif(coalesce(e.steps, r.steps), '')
from clock, e
where r.ctid = e.place
returning e.position, case when r.waited then pg_notify('{name}', encode(r.scope, 'hex')) is not null end

-- name: settle_done_many
-- As settle_done, with arrays, as settle_many.
with clock as materialized (
    select clock_timestamp() as now
), e as materialized (
    select ends.position, ends.keep, ends.result, held.place
    from clock
    cross join unnest($1::bytea[], $2::bytea[], $3::float8[], $4::bytea[])
        with ordinality as ends(scope, nonce, keep, result, position)
    cross join lateral (
        select r.ctid as place, r.scope from {records} r
        where r.scope = ends.scope and r.nonce = ends.nonce and {running}
          and (r.policy <> 'retry' or r.expires is null or r.expires > now)
        for update skip locked
    ) held
    where held.scope = ends.scope
)
update {records} r
set state = 'done', updated = now, settled = now, lease_until = now, expires = now + make_interval(secs => e.keep),
    tombstone = null, not_before = null, marker = null, result = e.result, error_type = null, error_code = null,
    error_message = null
from clock, e
where r.ctid = e.place
returning e.position, case when r.waited then pg_notify('{name}', encode(r.scope, 'hex')) is not null end

-- name: running
-- Part of the statements that find one run by its scope. Not `state = 'running'`: that would let the planner walk the
-- index of open leases instead of the key, and through every run that ended since the last vacuum.
r.state || '' = 'running'

-- name: moment
-- Part of the statements that are sent for every call: when this statement arrived. A `clock` to join with says the same
-- to the microsecond, and costs a tenth of the statement.
(statement_timestamp() + make_interval(secs => $1::float8))

-- name: renew
-- $2 scopes $3 nonces $4 leases $5 retentions (NULL: for ever). One row (its position) per lease extended. Locked as in
-- settle_many.
with clock as materialized (
    select clock_timestamp() + make_interval(secs => $1::float8) as now
), b as materialized (
    select beats.*, held.place
    from clock
    cross join unnest($2::bytea[], $3::bytea[], $4::float8[], $5::float8[])
        with ordinality as beats(scope, nonce, lease, retention, position)
    cross join lateral (
        select r.ctid as place, r.scope from {records} r
        where r.scope = beats.scope and r.nonce = beats.nonce and {running}
          and (r.policy <> 'retry' or r.expires is null or r.expires > now)
        for update skip locked
    ) held
    where held.scope = beats.scope
)
update {records} r
set updated = now, lease_until = to_timestamp(date_part('epoch', now) + b.lease),
    expires = case when r.policy = 'retry' then to_timestamp(date_part('epoch', now) + b.lease + b.retention) end
from clock, b
where r.ctid = b.place
returning b.position

-- name: note
-- A step's mark. $2 scope $3 nonce $4 entry. One row if it was accepted.
with clock as materialized (
    select clock_timestamp() + make_interval(secs => $1::float8) as now, set_config('lock_timeout', '50ms', true)
)
update {records} r
set steps = coalesce(r.steps, '') || $4::bytea, noted = now, updated = now
from clock
where r.scope = $2::bytea and r.nonce = $3::bytea and {running}
  and (r.policy <> 'retry' or r.expires is null or r.expires > now)
returning true

-- name: read
-- $2 scope. One row: now, version (NULL: not there), waited, the record.
select date_part('epoch', clock.now), r.*
from (select clock_timestamp() + make_interval(secs => $1::float8) as now) clock
left join (select xmin::text as version, waited, {row} from {records} where scope = $2::bytea) r on true

-- name: swap
-- Write records that the model decided, each if its row is still the version that was read. Arrays, sorted by scope:
-- $2-$30 the columns of a record in their order, $31 version, $32 whether this ends a run (waiters are told);
-- for the audit trail $33 kind or NULL, $34 state before, $35 actor, $36 reason, $37 seconds to keep or NULL.
-- One row (its position) per record written.
with clock as materialized (
    select clock_timestamp() + make_interval(secs => $1::float8) as now, set_config('lock_timeout', '50ms', true)
), w as materialized (
    select * from unnest(
        $2::bytea[], $3::text[], $4::text[], $5::text[], $6::text[], $7::bytea[], $8::integer[], $9::bigint[],
        $10::text[], $11::bytea[], $12::integer[], $13::float8[], $14::float8[], $15::float8[], $16::float8[],
        $17::float8[], $18::float8[], $19::float8[], $20::float8[], $21::boolean[], $22::text[], $23::bytea[],
        $24::text[], $25::text[], $26::text[], $27::text[], $28::text[], $29::bytea[], $30::text[],
        $31::text[], $32::boolean[], $33::text[], $34::text[], $35::text[], $36::text[], $37::float8[])
    with ordinality as w(
        scope, tenant, operation, key, state, nonce, attempts, token, policy, fingerprint, fingerprint_version,
        created, updated, lease_until, expires, settled, tombstone, not_before, noted, resolved, marker, result, ref,
        error_type, error_code, error_message, labels, steps, secret_id,
        version, ends, audit_kind, audit_state, actor, reason, keep, position)
), locked as materialized (
    select w.position
    from clock cross join w join {records} r on r.scope = w.scope
    where r.xmin::text = w.version
    order by w.scope
    for update of r
), changed as (
    update {records} r
    set tenant = w.tenant, operation = w.operation, key = w.key, state = w.state, nonce = w.nonce,
        attempts = w.attempts, token = w.token, policy = w.policy, fingerprint = w.fingerprint,
        fingerprint_version = w.fingerprint_version, created = to_timestamp(w.created),
        updated = to_timestamp(w.updated), lease_until = to_timestamp(w.lease_until),
        expires = to_timestamp(w.expires), settled = to_timestamp(w.settled), tombstone = to_timestamp(w.tombstone),
        not_before = to_timestamp(w.not_before), noted = to_timestamp(w.noted), resolved = w.resolved,
        marker = w.marker, result = w.result, ref = w.ref, error_type = w.error_type, error_code = w.error_code,
        error_message = w.error_message, labels = w.labels, steps = w.steps, secret_id = w.secret_id
    from w join locked using (position)
    where r.scope = w.scope and r.xmin::text = w.version
    returning w.position, case when r.waited and w.ends then pg_notify('{name}', encode(r.scope, 'hex')) is not null end
), audited as (
    insert into {audit} (scope, at, kind, state, actor, reason, attempt, kept_until)
    select w.scope, to_timestamp(w.updated), w.audit_kind, w.audit_state, w.actor, w.reason, w.attempts,
           to_timestamp(w.updated + w.keep)
    from w join changed using (position)
    where w.audit_kind is not null
)
select position from changed

-- name: forget
-- Remove a record if it is still the version that was read. $2 scope $3 version; for the audit trail $4 at (seconds)
-- $5 state before $6 actor or NULL $7 reason $8 attempt $9 seconds to keep or NULL. One row if it was removed.
with clock as materialized (
    select set_config('lock_timeout', '50ms', true), $1::float8
), gone as (
    delete from {records} r using clock
    where r.scope = $2::bytea and r.xmin::text = $3::text
    returning r.scope, case when r.waited then pg_notify('{name}', encode(r.scope, 'hex')) is not null end
), audited as (
    insert into {audit} (scope, at, kind, state, actor, reason, attempt, kept_until)
    select scope, to_timestamp($4::float8), 'forgotten', $5::text, $6::text, $7::text, $8::integer,
           to_timestamp($4::float8 + $9::float8)
    from gone
    where $6::text is not null
)
select true from gone

-- name: mark
-- Somebody waits for this key: its settle shall notify. $2 scope. Needs no durability: a lost mark is a late wake-up.
with clock as materialized (
    select set_config('lock_timeout', '50ms', true), set_config('synchronous_commit', 'off', true), $1::float8
)
update {records} r set waited = true from clock where r.scope = $2::bytea and not r.waited

-- name: scan
-- What needs attention, in the order of scopes. $2 viewed states $3 tenant or NULL $4 operation or NULL
-- $5 only runs whose lease is over $6 after this scope $7 how many. Rows: now, the record.
-- {viewed} restates model.view. A row whose state nobody knows is shown as unknown: a person must look at it.
-- Two halves, so that each finds its partial index: what is done, nearly everything, is never read.
with clock as materialized (
    select clock_timestamp() + make_interval(secs => $1::float8) as now
)
select date_part('epoch', clock.now), {row:r}
from (select * from {records} where state = 'running'
      union all
      select * from {records} where state not in ('running', 'done')) r cross join clock
where {filter}
order by r.scope
limit $7::integer

-- name: scan_all
-- The same when outcomes are asked for as well: through the whole table, by its key.
with clock as materialized (
    select clock_timestamp() + make_interval(secs => $1::float8) as now
)
select date_part('epoch', clock.now), {row:r}
from {records} r cross join clock
where {filter}
order by r.scope
limit $7::integer

-- name: scan_ref
-- The same among the records with the ref $8.
with clock as materialized (
    select clock_timestamp() + make_interval(secs => $1::float8) as now
)
select date_part('epoch', clock.now), {row:r}
from {records} r cross join clock
where r.ref = $8::text and {filter}
order by r.scope
limit $7::integer

-- name: filter
-- Part of the scans.
r.scope > $6::bytea
  and ($3::text is null or r.tenant = $3::text)
  and ($4::text is null or r.operation = $4::text)
  and (not $5::boolean or (r.state = 'running' and r.lease_until <= now))
  and {viewed} = any ($2::text[])

-- name: viewed
-- Part of the scans: what a row reads as.
case
    when r.state in ('done', 'failed', 'released', 'expired') then
        case when r.expires is null or r.expires > now then r.state
             when r.state <> 'released' and r.tombstone > now then 'expired' end
    when r.state <> 'running' then 'unknown'
    when r.policy = 'retry' then case when r.expires is null or r.expires > now then 'running' end
    when r.lease_until > now then 'running'
    else 'unknown'
end

-- name: now
-- The store's clock, for a page without rows.
select date_part('epoch', clock_timestamp() + make_interval(secs => $1::float8))

-- name: history
-- The audit trail of $2 scope, oldest first; it is kept whole until the last entry's time is over.
with clock as materialized (
    select clock_timestamp() + make_interval(secs => $1::float8) as now
), trail as materialized (
    select id, date_part('epoch', at) as at, kind, state, actor, reason, attempt, kept_until
    from {audit} where scope = $2::bytea
)
select date_part('epoch', clock.now), trail.at, trail.kind, trail.state, trail.actor, trail.reason, trail.attempt
from clock left join trail on exists (select from trail t where t.kept_until is null or t.kept_until > clock.now)
order by trail.id

-- name: purge
-- Remove up to $2 records that read as absent. A row that somebody has locked is left for the next time; a row that
-- changed since is looked at again before it goes; a row that cannot be read stays. Abandoned runs under `retry` are found through the open leases.
with clock as materialized (
    select clock_timestamp() + make_interval(secs => $1::float8) as now
), ended as materialized (
    select r.scope from {records} r
    where r.state <> 'running' and greatest(r.expires, r.tombstone) <= (select now from clock)
      and r.state in ('done', 'failed', 'released', 'expired') and {readable}
    limit $2::integer
    for update skip locked
), abandoned as materialized (
    select r.scope from {records} r
    where r.state = 'running' and r.lease_until <= (select now from clock)
      and r.policy = 'retry' and r.expires <= (select now from clock) and {readable}
    limit $2::integer
    for update skip locked
)
delete from {records} r
where r.scope = any (array(select scope from ended union all select scope from abandoned limit $2::integer))
returning true

-- name: purge_bodies
-- Up to $2 records past their retention whose key is still known as used: the tombstone stays, the body goes
-- (model.bury). So does the time of expiry: a clock that is set back must not make an outcome without a body of it again.
with clock as materialized (
    select clock_timestamp() + make_interval(secs => $1::float8) as now
), old as materialized (
    select r.scope from {records} r
    where r.expires <= (select now from clock) and {buriable} and {readable}
    limit $2::integer
    for update skip locked
)
update {records} r
set result = null, error_type = null, error_code = null, error_message = null, steps = null, ref = null, labels = null,
    marker = null, expires = 'epoch'
where r.scope in (select scope from old)

-- name: readable
-- Part of the purges: a row that `record_of` can read. {labels} is what labels look like.
r.policy in ('retry', 'probe', 'hold') and (r.labels is null or r.labels ~ E'{labels}')

-- name: buriable
-- Part of purge_bodies and of its index.
tombstone is not null and (result is not null or error_type is not null or steps is not null or ref is not null
                           or labels is not null or marker is not null)

-- name: purge_audit
-- Up to $2 audit entries of scopes whose whole trail is over.
with clock as materialized (
    select clock_timestamp() + make_interval(secs => $1::float8) as now
), old as materialized (
    select a.id from {audit} a
    where a.kept_until <= (select now from clock)
      and not exists (select from {audit} b where b.scope = a.scope
                      and (b.kept_until is null or b.kept_until > (select now from clock)))
    limit $2::integer
    for update skip locked
)
delete from {audit} a where a.id in (select id from old)

-- name: hello
-- First words on a new connection: who serves it (a pooler answers with another process id than it greeted with) and
-- whether the tables are there.
select pg_backend_pid(), to_regclass('{schema}') is not null

-- name: version
-- The version, the tables that a crash would empty, and those that end with this session, if there are any.
select version, (
    select string_agg(oid::regclass::text, ', ' order by relname) from pg_class
    where oid in (to_regclass('{records}'), to_regclass('{audit}'), to_regclass('{schema}')) and relpersistence = 'u'
), (
    select string_agg(oid::regclass::text, ', ' order by relname) from pg_class
    where oid in (to_regclass('{records}'), to_regclass('{audit}'), to_regclass('{schema}')) and relpersistence = 't'
) from {schema}

-- name: facts
-- The live settings that decide the guarantee, as name and value. A logical subscriber and a running backup are no standbys:
-- nobody fails over to them. Without pg_read_all_stats a standby is a row without a name and without a state.
with standby as (
    select application_name, sync_state from pg_stat_replication r
    where state is distinct from 'backup'
      and not exists (select from pg_replication_slots s where s.active_pid = r.pid and s.slot_type = 'logical')
)
select name, setting from pg_settings
where name in ('server_version', 'fsync', 'synchronous_commit', 'full_page_writes', 'synchronous_standby_names',
               'max_prepared_transactions', 'default_transaction_isolation', 'default_transaction_read_only',
               'data_checksums')
union all select 'in_recovery', pg_is_in_recovery()::text
union all select 'standbys', count(*)::text from standby
union all select 'standbys_not_waited_for', count(*)::text from standby where sync_state not in ('sync', 'quorum')
having count(*) > 0
union all select 'standbys_not_seen', count(*)::text from standby where sync_state is null having count(*) > 0
union all select 'standby_names', string_agg(application_name, ', ' order by application_name) from standby
having count(application_name) > 0
union all select 'unlogged_tables', string_agg(oid::regclass::text, ', ' order by relname) from pg_class
where oid in (to_regclass('{records}'), to_regclass('{audit}'), to_regclass('{schema}')) and relpersistence = 'u'
having count(*) > 0
union all select 'missing_rights', string_agg(distinct p.name, ', ') || ' ON ' || string_agg(distinct t.oid::text, ', ')
    || ' TO ' || quote_ident(current_user)
from (values ('SELECT'), ('INSERT'), ('UPDATE'), ('DELETE')) as p (name),
     (values (to_regclass('{records}')), (to_regclass('{audit}'))) as t (oid)
where not has_table_privilege(t.oid, p.name)
having count(*) > 0
union all select 'synchronous_commit_source', source from pg_settings where name = 'synchronous_commit'

-- name: barrier
-- Written and replicated like any commit, holds nothing: when it is acknowledged, so is everything before it.
select pg_logical_emit_message(true, '{name}', '')

-- name: schema
-- Version 1. Safe to run again and by many at once (the lock ends with the transaction).
--
-- `waited` is set by waiters and never cleared. Rows are updated once or twice in their life; what an update changes
-- (state, lease, expiry) is indexed, so HOT helps only marks and notes, and fillfactor leaves them room. The indexes are
-- partial: a claim writes one of them beside the key, a settle to `done` one.
select pg_advisory_xact_lock(7310027190031157869);
create table if not exists {records} (
    scope bytea constraint {pkey} primary key,
    tenant text not null,
    operation text not null,
    key text not null,
    state text not null,
    nonce bytea not null,
    attempts integer not null,
    token bigint not null,
    policy text not null,
    fingerprint bytea,
    fingerprint_version integer not null,
    created timestamptz not null,
    updated timestamptz not null,
    lease_until timestamptz not null,
    expires timestamptz,
    settled timestamptz,
    tombstone timestamptz,
    not_before timestamptz,
    noted timestamptz,
    resolved boolean not null default false,
    marker text,
    result bytea,
    ref text,
    error_type text,
    error_code text,
    error_message text,
    labels text,
    steps bytea,
    secret_id text,
    waited boolean not null default false
) with (fillfactor = 90);
-- What purge removes, and when.
create index if not exists {name}_expiry on {records} (greatest(expires, tombstone)) where state <> 'running';
-- Bodies that purge removes before their tombstone.
create index if not exists {name}_bodies on {records} (expires)
    where {buriable};
-- What needs attention, by tenant and operation; runs are found by their leases.
create index if not exists {name}_attention on {records} (tenant, operation, state)
    where state not in ('running', 'done');
-- Open leases: abandoned runs are found here.
create index if not exists {name}_open on {records} (lease_until) where state = 'running';
create index if not exists {name}_ref on {records} (ref) where ref is not null;
-- Who changed what by hand, from which state, and why.
create table if not exists {audit} (
    id bigint generated always as identity primary key,
    scope bytea not null,
    at timestamptz not null,
    kind text not null,
    state text,
    actor text not null,
    reason text not null,
    attempt integer not null,
    kept_until timestamptz
);
create index if not exists {name}_audit_scope on {audit} (scope, id);
create index if not exists {name}_audit_expiry on {audit} (kept_until);
-- Begin a run of a key that is not there; false when somebody else was faster. (An assignment is evaluated at once;
-- PERFORM would run a query for it, which costs half as much as the insertion.)
create or replace function {begin}(
    scope bytea, tenant text, operation text, key text, nonce bytea, policy text, fingerprint bytea,
    fingerprint_version integer, lease float8, life float8, labels text, secret_id text, now timestamptz
) returns boolean language plpgsql as $begin$
declare
    limited text := set_config('lock_timeout', '50ms', true);
begin
    insert into {records} (scope, tenant, operation, key, state, nonce, attempts, token, policy, fingerprint,
                           fingerprint_version, created, updated, lease_until, expires, labels, secret_id)
    values ($1, $2, $3, $4, 'running', $5, 1, floor(date_part('epoch', $13) * 1000000)::bigint, $6, $7, $8, $13, $13,
            to_timestamp(date_part('epoch', $13) + $9), to_timestamp(date_part('epoch', $13) + $10), $11, $12)
    on conflict on constraint {pkey} do nothing;
    return found;
end
$begin$;
-- The same for many runs, sorted by scope so that no two batches deadlock; the scopes that are ours. An array that is NULL
-- says NULL of all of them; without policies they are under `retry`.
create or replace function {begin_all}(
    scopes bytea[], tenants text[], operations text[], keys text[], nonces bytea[], policies text[], fingerprints bytea[],
    fingerprint_versions integer[], leases float8[], lives float8[], all_labels text[], secret_ids text[], now timestamptz
) returns bytea[] language plpgsql as $begin_all$
declare
    limited text := set_config('lock_timeout', '50ms', true);
    ours bytea[];
begin
    with entered as (
        insert into {records} as r (scope, tenant, operation, key, state, nonce, attempts, token, policy, fingerprint,
                                    fingerprint_version, created, updated, lease_until, expires, labels, secret_id)
        select a.scope, a.tenant, a.operation, a.key, 'running', a.nonce, 1, floor(date_part('epoch', $13) * 1000000)::bigint,
               coalesce(a.policy, 'retry'), a.fingerprint, coalesce(a.fingerprint_version, {print}), $13, $13,
               to_timestamp(date_part('epoch', $13) + a.lease), to_timestamp(date_part('epoch', $13) + a.life), a.labels,
               a.secret_id
        from unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)
             as a(scope, tenant, operation, key, nonce, policy, fingerprint, fingerprint_version, lease, life, labels, secret_id)
        order by a.scope
        on conflict on constraint {pkey} do nothing
        returning r.scope
    ) select array_agg(entered.scope) into ours from entered;
    return ours;
end
$begin_all$;
-- {begin} inside a caller's transaction (`within`): it waits as long as this caller would, and leaves his lock_timeout
-- as it was (an error takes it back with his savepoint). A function, so that SAVEPOINT and claim travel in one message and
-- no plan is made for them.
create or replace function {enter}(
    scope bytea, tenant text, operation text, key text, nonce bytea, token bigint, fingerprint bytea,
    fingerprint_version integer, lease float8, labels text, secret_id text, patience text
) returns boolean language plpgsql as $enter$
declare
    before text := current_setting('lock_timeout');
    limited text := set_config('lock_timeout', $12, true);
    now timestamptz := clock_timestamp();
begin
    insert into {records} (scope, tenant, operation, key, state, nonce, attempts, token, policy, fingerprint,
                           fingerprint_version, created, updated, lease_until, labels, secret_id)
    values ($1, $2, $3, $4, 'running', $5, 1, $6, 'hold', $7, $8, now, now, now + make_interval(secs => $9), $10, $11)
    on conflict on constraint {pkey} do nothing;
    limited := set_config('lock_timeout', before, true);
    return found;
end
$enter$;
create table if not exists {schema} (version integer not null);
insert into {schema} (version) select 1 where not exists (select from {schema});
