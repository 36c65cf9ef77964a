-- semel on SQLite, schema version 1. Times are Unix seconds, NULL means "never" or "not set".
-- A rowid table on purpose: records of a kilobyte make a WITHOUT ROWID tree deep and slow.

CREATE TABLE IF NOT EXISTS "{table}" (
    id                  INTEGER PRIMARY KEY,
    scope               BLOB    NOT NULL UNIQUE,  -- SHA-256 of prefix, tenant, operation, key: the identity
    tenant              TEXT    NOT NULL,
    operation           TEXT    NOT NULL,
    key                 TEXT    NOT NULL,         -- as much of it as `readable` allows
    state               TEXT    NOT NULL,         -- running, done, failed, unknown, released
    nonce               BLOB    NOT NULL,         -- the owner's: every later write compares it
    attempts            INTEGER NOT NULL,
    token               INTEGER NOT NULL,
    policy              TEXT    NOT NULL,         -- retry, probe, hold
    fingerprint         BLOB,
    fingerprint_version INTEGER NOT NULL,
    created             REAL    NOT NULL,
    updated             REAL    NOT NULL,
    lease_until         REAL    NOT NULL,
    expires             REAL,
    settled             REAL,
    tombstone           REAL,
    not_before          REAL,
    noted               REAL,
    resolved            INTEGER NOT NULL,
    marker              TEXT,
    result              BLOB,
    ref                 TEXT,
    error_type          TEXT,
    error_code          TEXT,
    error_message       TEXT,
    labels              TEXT,                     -- a JSON object of strings
    steps               BLOB,
    secret_id           TEXT
);

-- What can be purged: the later of expiry and tombstone. Runs are left out (the index of open ones finds the lapsed),
-- so that a claim need not write here what its settle would move.
CREATE INDEX IF NOT EXISTS "{table}_expiry" ON "{table}" (max(expires, coalesce(tombstone, 0)))
    WHERE expires IS NOT NULL AND state <> 'running';

-- Whose retention is over while their tombstone stands: a purge takes their bodies, and the time of expiry with them.
CREATE INDEX IF NOT EXISTS "{table}_bodies" ON "{table}" (expires)
    WHERE tombstone IS NOT NULL AND expires > 0;

-- Runs are left out here as well: a claim would write what its settle has to move. They are found among the open ones.
CREATE INDEX IF NOT EXISTS "{table}_places" ON "{table}" (tenant, operation, state)
    WHERE state <> 'running';

-- What needs attention, and leases that ran out, without reading what is done. (A list of three states would be made into
-- a table of its own for every row that is written.)
CREATE INDEX IF NOT EXISTS "{table}_open" ON "{table}" (state, lease_until)
    WHERE state = 'running' OR state = 'unknown' OR state = 'failed';

CREATE INDEX IF NOT EXISTS "{table}_ref" ON "{table}" (ref) WHERE ref IS NOT NULL;

-- Who decided what, and why. A scope's lines are kept until the last of them may go.
CREATE TABLE IF NOT EXISTS "{table}_audit" (
    id         INTEGER PRIMARY KEY,
    scope      BLOB    NOT NULL,
    at         REAL    NOT NULL,
    kind       TEXT    NOT NULL,
    state      TEXT,
    actor      TEXT    NOT NULL,
    reason     TEXT    NOT NULL,
    attempt    INTEGER NOT NULL,
    kept_until REAL
);

CREATE INDEX IF NOT EXISTS "{table}_audit_scope" ON "{table}_audit" (scope);

CREATE INDEX IF NOT EXISTS "{table}_audit_expiry" ON "{table}_audit" (kept_until) WHERE kept_until IS NOT NULL;

CREATE TABLE IF NOT EXISTS "{table}_schema" (
    version INTEGER NOT NULL PRIMARY KEY
);

INSERT OR IGNORE INTO "{table}_schema" (version) VALUES (1);
