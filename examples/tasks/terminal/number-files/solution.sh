#!/bin/bash
cd /app/notes
for i in 3 2 1; do mv $i.txt $((i + 1)).txt; done
echo 4 > /app/highest
