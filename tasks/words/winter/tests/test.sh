#!/bin/sh
# Reward: 1 for 3 to 12 words in answer.txt; less for fewer, and a tenth less for each word too many.
n=$(wc -w < answer.txt)
awk -v n="$n" -v low=3 -v high=12 'BEGIN {
  r = n < low ? n / (2 * low) : n > high ? 1 - (n - high) / 10 : 1
  printf "%.3f\n", r < 0 ? 0 : r
}' > "${TURNGATE_REWARDS:-/logs/verifier}/reward.txt"
