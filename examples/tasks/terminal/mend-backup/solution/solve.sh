#!/bin/bash
cat > /app/backup.sh <<'END'
#!/bin/bash
set -e
mkdir -p /app/saved
cp /app/notes/*.txt /app/saved/
ls /app/notes/*.txt | wc -l > /app/saved/count
END
bash /app/backup.sh
