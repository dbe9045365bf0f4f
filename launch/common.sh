# shellcheck shell=bash
# What the wrappers of launch/ share; sourced, not run. Works with bash 3.2 (macOS).

fail() { # one line, exit 2
  echo "error: ${0##*/}: $1" >&2
  exit 2
}

say() { echo "${0##*/}: $1" >&2; }

usage() { # the comment at the head of the calling script
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
}

need() { # need --zone "$zone": fails where the value is missing or would be read as a flag
  [ -n "$2" ] || fail "$1 is missing; $3"
  case $2 in -*) fail "$1 is '$2'; $3" ;; esac
}

need_number() {
  case $2 in '' | *[!0-9]* | 0*) fail "$1 is '$2'; expected a whole number, at least 1" ;; esac
}

need_name() { # what Google Cloud, Kubernetes and SLURM all take as a name
  need "$1" "$2" "$3"
  case $2 in *[!a-z0-9-]* | [!a-z]* | *-) fail "$1 is '$2'; expected lower-case letters, digits and inner hyphens, a letter first" ;; esac
}

quoted() { # the arguments as a shell would read them back
  local word line='' escaped="'\\''"
  for word in "$@"; do
    case $word in
    *[!A-Za-z0-9_./:=,@%+-]* | '') word="'${word//\'/"$escaped"}'" ;;
    esac
    line="$line $word"
  done
  printf '%s' "${line# }"
}

call() { # runs a command; with --dry-run only prints it
  if [ -n "${dry_run:-}" ]; then
    quoted "$@"
    echo
  else
    "$@"
  fi
}
