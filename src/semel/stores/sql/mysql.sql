-- The statements of the MariaDB/MySQL store, one per `-- name:`. Read by mysql_rows.py.
--
-- Rules of this file
-- 1. Every verb is made of single statements, each a transaction of its own at READ COMMITTED. Nothing is held while
--    the client thinks: a paused client blocks nobody. (`SELECT … FOR UPDATE`, then deciding in Python, then writing,
--    was rejected: a client stopped in between would keep the key locked until the server's wait_timeout, 8 hours.)
-- 2. What Python decided on a row it read is written only if that row is still the same version: every write counts
--    `version` up, and nonce + version never come back.
-- 3. Time is the server's UTC clock, read by the statement: {now}. DATETIME(6); NULL means never, or not set.
-- 4. `:values` stands for the rows of a batch as a derived table `v`, in scope order, joined by primary key, so that
--    batches lock rows in one order and never wait for a stranger's row. Only for small values: MariaDB 10.11 cuts a
--    literal of more than 64 KiB in such a table silently, or crashes. Outcomes go as many statements in one packet.
-- 5. Writes do not wait for a locked row longer than the session allows: MariaDB not at all, MySQL a second, which is
--    its least; there `probe` goes ahead of every write in the same packet and fails at once.
-- 6. No statement depends on sql_mode: names are in backticks, texts in single quotes, nothing is truncated silently.
-- 7. What locks rows and could be answered by another index than the primary key's says FORCE INDEX (PRIMARY): on its way
--    through another one it would meet the locked rows of strangers.
--
-- {table} {audit} {schema}  the table names       {row} the clock, the version and all columns of r, packed (mysql_rows.py)
-- {names}  the columns, as in rows.COLUMNS        {changes} `name` = %s for each of them but scope

-- name: read
-- One row per scope that is there, or a single row of NULLs when none is. A plain read: no lock, no write.
SELECT {row}
FROM (SELECT 1) AS one LEFT JOIN {table} AS r ON r.`scope` IN (:scopes)

-- name: insert
-- A key that was not there. Somebody faster makes it fail as a duplicate (1062): read again, decide again.
INSERT INTO {table} ({names}) VALUES :rows

-- name: probe
SELECT 1 FROM {table} FORCE INDEX (PRIMARY) WHERE `scope` IN (:scopes) FOR UPDATE NOWAIT

-- name: replace
-- What the model decided, if the row is still what the model saw. Parameters: the columns, scope, nonce, version.
UPDATE {table} SET {changes}, `buried` = 0, `version` = `version` + 1
WHERE `scope` = %s AND `nonce` = %s AND `version` = %s

-- name: delete
-- Forget a key, if it is still what the model saw. Parameters: scope, nonce, version.
DELETE FROM {table} WHERE `scope` = %s AND `nonce` = %s AND `version` = %s

-- name: settle
-- The owner's word on a live run, in one statement (model.settle without reading first). No row changed: the slow way
-- finds out why. `retention` and `tombstone` (both from now) are microseconds; NULL: never, none.
-- No assignment may use a column that an earlier one changes (in MySQL it would see the new value): `steps` is changed
-- only for kinds whose expiry does not look at it.
UPDATE {table} AS r FORCE INDEX (PRIMARY)
SET r.`state` = %(state)s,
    r.`updated` = {now},
    r.`settled` = {now},
    r.`lease_until` = {now},
    r.`expires` = IF(%(state)s = 'released' AND r.`steps` IS NOT NULL
                     AND r.`noted` + INTERVAL %(retention)s MICROSECOND > {now}, r.`noted`, {now})
                  + INTERVAL %(retention)s MICROSECOND,
    r.`tombstone` = {now} + INTERVAL %(tombstone)s MICROSECOND,
    r.`not_before` = NULL,
    r.`policy` = COALESCE(%(policy)s, r.`policy`),
    r.`marker` = %(marker)s,
    r.`result` = %(result)s,
    r.`ref` = COALESCE(%(ref)s, r.`ref`),
    r.`error_type` = %(error_type)s,
    r.`error_code` = %(error_code)s,
    r.`error_message` = %(error_message)s,
    r.`steps` = NULLIF(COALESCE(%(steps)s, r.`steps`), ''),
    r.`version` = r.`version` + 1
WHERE r.`scope` = %(scope)s AND r.`nonce` = %(nonce)s
  AND r.`state` = 'running' AND (r.`expires` IS NULL OR r.`expires` > {now})

-- name: renew
-- A heartbeat. `lease` and `life` (lease + retention; NULL: for ever) are microseconds from now.
UPDATE :values {table} AS r FORCE INDEX (PRIMARY)
SET r.`updated` = {now},
    r.`lease_until` = {now} + INTERVAL v.lease MICROSECOND,
    r.`expires` = IF(r.`policy` = 'retry', {now} + INTERVAL v.life MICROSECOND, NULL),
    r.`version` = r.`version` + 1
WHERE r.`scope` = v.scope AND r.`nonce` = v.nonce
  AND r.`state` = 'running' AND (r.`expires` IS NULL OR r.`expires` > {now})

-- name: note
-- Append a step. CONCAT gives NULL beyond max_allowed_packet, hence the condition: steps are never lost silently.
UPDATE {table} AS r FORCE INDEX (PRIMARY)
SET r.`steps` = CONCAT(COALESCE(r.`steps`, ''), %(entry)s),
    r.`noted` = {now},
    r.`updated` = {now},
    r.`version` = r.`version` + 1
WHERE r.`scope` = %(scope)s AND r.`nonce` = %(nonce)s
  AND r.`state` = 'running' AND (r.`expires` IS NULL OR r.`expires` > {now})
  AND OCTET_LENGTH(COALESCE(r.`steps`, '')) + OCTET_LENGTH(%(entry)s) < @@max_allowed_packet

-- name: witness
-- The audit line of the write just after it in the same transaction, if the row is still what the model saw, and locked from
-- here on. Before it, not after it WHERE ROW_COUNT() = 1: a client that is gone when the write is answered makes that -1, and
-- the write was committed without its line.
INSERT INTO {audit} (`scope`, `at`, `kind`, `state`, `actor`, `reason`, `attempt`, `kept_until`)
SELECT %(scope)s, %(at)s, %(kind)s, %(state)s, %(actor)s, %(reason)s, %(attempt)s, %(kept_until)s
FROM {table} AS r WHERE r.`scope` = %(scope)s AND r.`nonce` = %(nonce)s AND r.`version` = %(version)s FOR UPDATE

-- name: history
-- A scope's audit trail, oldest first; kept as a whole until its last line may go. NULLs when there is none.
SELECT {now}, a.`at`, a.`kind`, a.`state`, a.`actor`, a.`reason`, a.`attempt`, a.`kept_until`
FROM (SELECT 1) AS one LEFT JOIN {audit} AS a ON a.`scope` = %s
ORDER BY a.`id`

-- name: scan
-- A superset of a page, in scope order, never a record that reads as absent; Python applies model.view and the rest.
SELECT {row}
FROM {table} AS r
WHERE r.`scope` > %(after)s
  AND (r.`purge_after` IS NULL OR r.`purge_after` > {now}
       OR (r.`state` IN ('done', 'failed') AND r.`tombstone` > {now})):filter
ORDER BY r.`scope` LIMIT %(limit)s

-- name: clock
SELECT {now}

-- name: due
-- What purge has to do: records that read as absent, and tombstones (last column 1) that still have a body. A row that
-- cannot be read stays as it is; {labels} is what labels look like.
SELECT r.`scope`, r.`nonce`, r.`version`, r.`state` IN ('done', 'failed') AND COALESCE(r.`tombstone` > {now}, FALSE)
FROM {table} AS r
WHERE r.`purge_after` <= {now} AND r.`policy` IN ('retry', 'probe', 'hold')
  AND (r.`labels` IS NULL OR r.`labels` REGEXP {labels})
ORDER BY r.`purge_after` LIMIT %s

-- name: purge
-- Drop exactly the versions that were seen dead: one that was claimed meanwhile is another version and stays.
DELETE r FROM :values {table} AS r
WHERE r.`scope` = v.scope AND r.`nonce` = v.nonce AND r.`version` = v.version

-- name: bury
-- What model.bury leaves of a tombstone: that the key was used. The time of expiry goes too: a clock that is set back must
-- not make an outcome without a body of it again.
UPDATE :values {table} AS r
SET r.`result` = NULL, r.`ref` = NULL, r.`marker` = NULL, r.`labels` = NULL, r.`steps` = NULL,
    r.`error_type` = NULL, r.`error_code` = NULL, r.`error_message` = NULL,
    r.`expires` = TIMESTAMP'1970-01-01 00:00:00', r.`buried` = 1, r.`version` = r.`version` + 1
WHERE r.`scope` = v.scope AND r.`nonce` = v.nonce AND r.`version` = v.version

-- name: stale
-- Scopes whose audit trail may go as a whole.
SELECT a.`scope` FROM {audit} AS a
WHERE a.`kept_until` <= {now}
  AND NOT EXISTS (SELECT 1 FROM {audit} AS b WHERE b.`scope` = a.`scope` AND (b.`kept_until` IS NULL OR b.`kept_until` > {now}))
GROUP BY a.`scope` LIMIT 100

-- name: purge_audit
DELETE FROM {audit} WHERE `scope` = %s AND `kept_until` <= {now}

-- name: version
SELECT `version` FROM {schema} ORDER BY `version` DESC LIMIT 1

-- name: stamp
INSERT INTO {schema} (`version`, `created`) VALUES (%s, {now}) ON DUPLICATE KEY UPDATE `version` = `version`

-- name: create_records
-- `purge_after` is when purge has something to do with a record; the database itself keeps it right.
CREATE TABLE IF NOT EXISTS {table} (
    `scope`               BINARY(32)      NOT NULL COMMENT 'SHA-256 of prefix, tenant, operation, key: the identity',
    `tenant`              VARCHAR(255)    NOT NULL,
    `operation`           VARCHAR(255)    NOT NULL,
    `key`                 VARCHAR(255)    NOT NULL COMMENT 'as much of it as readable= allows',
    `state`               VARCHAR(16)     NOT NULL COMMENT 'running, done, failed, unknown, released',
    `nonce`               VARBINARY(64)   NOT NULL COMMENT 'the owner: every later write compares it',
    `attempts`            INT UNSIGNED    NOT NULL,
    `token`               BIGINT          NOT NULL,
    `policy`              VARCHAR(16)     NOT NULL COMMENT 'retry, probe, hold',
    `fingerprint`         VARBINARY(255)  NULL,
    `fingerprint_version` INT UNSIGNED    NOT NULL,
    `created`             DATETIME(6)     NOT NULL,
    `updated`             DATETIME(6)     NOT NULL,
    `lease_until`         DATETIME(6)     NOT NULL,
    `expires`             DATETIME(6)     NULL COMMENT 'NULL: never',
    `settled`             DATETIME(6)     NULL,
    `tombstone`           DATETIME(6)     NULL COMMENT 'until when the key is known as used after expiry',
    `not_before`          DATETIME(6)     NULL,
    `noted`               DATETIME(6)     NULL,
    `resolved`            TINYINT         NOT NULL,
    `marker`              VARCHAR(255)    NULL,
    `result`              LONGBLOB        NULL,
    `ref`                 VARCHAR(1024)   NULL,
    `error_type`          VARCHAR(1024)   NULL,
    `error_code`          VARCHAR(1024)   NULL,
    `error_message`       MEDIUMTEXT      NULL,
    `labels`              MEDIUMTEXT      NULL COMMENT 'a JSON object of strings',
    `steps`               LONGBLOB        NULL,
    `secret_id`           VARCHAR(255)    NULL,
    `version`             BIGINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'counted up by every write',
    `buried`              TINYINT         NOT NULL DEFAULT 0 COMMENT 'a tombstone whose body is gone',
    `purge_after`         DATETIME(6) GENERATED ALWAYS AS (
        CASE WHEN `state` NOT IN ('running', 'done', 'failed', 'released') THEN NULL
             WHEN `buried` = 1 AND `tombstone` > `expires` THEN `tombstone`
             ELSE `expires` END) STORED,
    PRIMARY KEY (`scope`),
    KEY `expiry` (`purge_after`),
    KEY `places` (`tenant`, `operation`, `state`),
    KEY `open_leases` (`state`, `lease_until`),
    KEY `ref` (`ref`(255))
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin

-- name: create_audit
CREATE TABLE IF NOT EXISTS {audit} (
    `id`         BIGINT UNSIGNED NOT NULL AUTO_INCREMENT,
    `scope`      BINARY(32)      NOT NULL,
    `at`         DATETIME(6)     NOT NULL,
    `kind`       VARCHAR(16)     NOT NULL,
    `state`      VARCHAR(16)     NULL COMMENT 'what the record read as before',
    `actor`      MEDIUMTEXT      NOT NULL,
    `reason`     MEDIUMTEXT      NOT NULL,
    `attempt`    INT UNSIGNED    NOT NULL,
    `kept_until` DATETIME(6)     NULL COMMENT 'NULL: for ever',
    PRIMARY KEY (`id`),
    KEY `scope` (`scope`, `id`),
    KEY `kept_until` (`kept_until`)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin

-- name: create_schema
-- Made last: who finds the version in it finds the other tables too.
CREATE TABLE IF NOT EXISTS {schema} (
    `version` INT UNSIGNED NOT NULL,
    `created` DATETIME(6)  NOT NULL,
    PRIMARY KEY (`version`)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin
