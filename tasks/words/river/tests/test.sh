#!/bin/sh
# Reward: 1 for 1 to 12 words in answer.txt, a tenth less for each word too many, 0 for none.
n=$(wc -w < answer.txt)
awk -v n="$n" -v most=12 'BEGIN {
  r = n < 1 ? 0 : n > most ? 1 - (n - most) / 10 : 1
  printf "%.3f\n", r < 0 ? 0 : r
}' > "${TURNGATE_REWARDS:-/logs/verifier}/reward.txt"
