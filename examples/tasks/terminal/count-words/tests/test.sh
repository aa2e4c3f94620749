#!/bin/bash
if python3 -m pytest -p no:cacheprovider -q /tests/test_outputs.py; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
