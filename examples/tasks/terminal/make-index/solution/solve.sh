#!/bin/bash
cd /app/pages
wc -c home about news | grep -v total | sort -nr | awk '{print $1, $2}' > /app/index.txt
