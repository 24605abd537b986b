# What .ci/bare and .ci/bazel share, to be sourced.

# Prints the mirror that this machine's apt uses; installs mmdebstrap unless it is there.
debian_mirror() {
  local mirror
  # Two scripts may ask at once, and apt's lists have one lock.
  (
    flock 9
    command -v mmdebstrap || { apt-get update -qq && apt-get install -y -qq mmdebstrap; }
  ) 9>/tmp/ddtree_jax_apt.lock >/dev/null
  mirror=$(apt-get indextargets --format '$(REPO_URI) $(LABEL)' 'Created-By: Packages' | awk '$2 == "Debian" {print $1; exit}')
  [ -n "$mirror" ] || { echo "no Debian mirror in apt's sources: run apt-get update on a Debian machine" >&2; return 1; }
  echo "$mirror"
}

# Runs mmdebstrap with the arguments given.
debian_folder() {
  mmdebstrap --quiet --variant=apt \
    --aptopt='Acquire::Check-Valid-Until "false"' --aptopt='Acquire::Check-Date "false"' "$@"
}
