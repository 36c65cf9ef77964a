# Sourced by ./test, ./demo and ./bench (bash, in the repository's root). It makes .venv from a hashed lock and installs
# the servers that the tests use. Nothing here downloads from anywhere but PyPI and the distribution's own packages.
#   ensure_venv dev|demo    .venv holds requirements/NAME.txt and semel itself (editable)
#   ensure_servers          redis-server, mariadbd, postgres, pgbouncer, rabbitmq and nats, as far as this user may
#                           install packages; sets SERVERS_COMPLETE to 1 or 0

export UV_PYTHON_DOWNLOADS=never   # uv would fetch an interpreter of its own; the machine's is used or we say so
export PIP_DISABLE_PIP_VERSION_CHECK=1
# pip trusts what the machine trusts (a company's own certificate, say); uv does so when told. A bare machine has none.
if [ -s /etc/ssl/certs/ca-certificates.crt ]; then export UV_SYSTEM_CERTS=1; fi

say() { printf '%s\n' "semel: $*" >&2; }

# ---- a Python that works ----------------------------------------------------------------------------------------
# Each candidate is run, not believed: a version manager's shim may exist for a version that is not active.
usable_python() {
  "$1" -c 'import sys, venv, ensurepip, sqlite3; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in "${SEMEL_PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.14 \
                   /usr/local/bin/python3 /usr/bin/python3 "$HOME"/.pyenv/versions/3.1[1-9]*/bin/python3; do
    if [ -n "$candidate" ] && usable_python "$candidate"; then
      # sys.executable, because .venv must not point at a shim
      "$candidate" -c 'import sys; print(sys.executable)'
      return 0
    fi
  done
  return 1
}

make_venv() {
  local python
  if ! python=$(find_python); then
    install_packages python3 python3-venv || true
    python=$(find_python) || {
      say "no Python >= 3.11 with the modules venv, ensurepip and sqlite3 was found."
      say "remedy: apt-get install python3 python3-venv, or name one: SEMEL_PYTHON=/path/to/python3 $0"
      exit 1
    }
  fi
  say "making .venv with $("$python" --version)"
  "$python" -m venv --clear .venv || exit 1
}

# ---- the virtual environment --------------------------------------------------------------------------------------
stamp_of() { cat "requirements/$1.txt" pyproject.toml | sha256sum | cut -d' ' -f1; }

fresh() { [ "$(cat ".venv/.stamp-$1" 2>/dev/null)" = "$(stamp_of "$1")" ]; }

# uv itself comes from the same lock, hash checked by pip.
install_uv() {
  local only_uv
  only_uv=$(mktemp)
  awk '/^[^ ]/ { on = /^uv==/ } on' requirements/demo.txt >"$only_uv"
  .venv/bin/python -m pip install -qq --no-deps --require-hashes -r "$only_uv"
  local status=$?
  rm -f "$only_uv"
  return $status
}

ensure_venv() {
  # Two commands started at once share one .venv: the second one waits.
  exec 9>.venv.lock
  command -v flock >/dev/null && flock 9
  usable_python .venv/bin/python || make_venv
  if ! fresh "$1" && ! { [ "$1" = demo ] && fresh dev; }; then
    say "installing requirements/$1.txt"
    install_uv || { say "pip could not install uv (is a package index reachable?)"; exit 1; }
    .venv/bin/uv pip install -q -p .venv/bin/python --require-hashes -r "requirements/$1.txt" || exit 1
    # the build backend is in the lock: no isolated, unlocked build environment
    .venv/bin/uv pip install -q -p .venv/bin/python --no-deps --no-build-isolation -e . || exit 1
    stamp_of "$1" >".venv/.stamp-$1"
  fi
  exec 9>&-
}

# ---- system packages ------------------------------------------------------------------------------------------------
may_install() {
  command -v apt-get >/dev/null || return 1
  [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null
}

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

# A Debian package starts its service when it is installed. The tests use private servers only, so the policy file
# forbids every start while apt runs; an existing policy is left as it is.
install_packages() {
  may_install || return 1
  local policy=/usr/sbin/policy-rc.d made=0 status=0
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null && as_root chmod 755 "$policy" && made=1
  fi
  say "apt-get install $*"
  as_root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -qq -o DPkg::Lock::Timeout=300 update >/dev/null || true
  as_root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -qq -y -o DPkg::Lock::Timeout=300 \
    -o Dpkg::Use-Pty=0 install --no-install-recommends "$@" >/dev/null || status=$?
  [ $made = 1 ] && as_root rm -f "$policy"
  # nor may they start at the next boot
  command -v systemctl >/dev/null && as_root systemctl disable "$@" >/dev/null 2>&1
  return $status
}

has() { # a server binary; Debian keeps some of them off an ordinary user's PATH
  PATH="$PATH:/usr/local/bin:/usr/sbin:/usr/local/sbin" command -v "$1" >/dev/null && return 0
  [ "$1" = postgres ] && compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null
}

missing_packages() {
  has redis-server || echo redis-server
  has mariadbd || echo mariadb-server-core           # the server alone: no service, no system database
  has my_print_defaults || echo mariadb-client-core  # mariadb-install-db needs it
  has postgres || echo postgresql
  has pgbouncer || echo pgbouncer
  has rabbitmq-server || echo rabbitmq-server        # its stream plugin is in the same package
  has nats-server || echo nats-server
}

ensure_servers() {
  local missing
  missing=$(missing_packages | tr '\n' ' ')
  if [ -n "$missing" ]; then
    # shellcheck disable=SC2086  # a list of names
    install_packages $missing || true
    missing=$(missing_packages | tr '\n' ' ')
  fi
  SERVERS_COMPLETE=1
  if [ -n "$missing" ]; then
    SERVERS_COMPLETE=0
    say "NOT INSTALLED: $missing- their tests will be skipped (remedy: sudo apt-get install $missing)"
  fi
  export SERVERS_COMPLETE
}
