# Process 1 of a sandbox: runs one command at a time for the host, and lets nothing outlive it.
#
# Frames, both ways: one byte, a 32-bit big-endian length, a payload. Requests on standard input, answers on standard
# output, in order:
#   X  "deadline_s keep_bytes\n" command  ->  "status signal cpu_us dropped head_bytes fault\n" head tail
#   W  files (mode, path length, path, content length, content; 32-bit numbers)  ->  empty, or the error
#   R  "max_bytes\n" path                 ->  "+" content, or "-" and the error
#   C  (empty)                            ->  empty after everything writable is gone, or what is left
# fault is "-", "timeout", "memory" or "files".
#
# Only Debian's perl-base is needed. As process 1 it cannot be signalled from inside its namespace, and it is not
# dumpable, so /proc/1 is closed. Started as root it keeps uid 0 with five capabilities and its commands get the
# sandbox's own uid; started in a user namespace both have the same uid.
# Arguments: uid, memory_mb, processes, cpu_s, inodes, machine, root (1 or 0), and a mark that ps shows.
use strict;
use warnings;
use Fcntl qw(O_WRONLY O_CREAT O_TRUNC O_RDONLY O_NONBLOCK S_ISREG);
use POSIX ();

my ($uid, $memory_mb, $processes, $cpu_s, $inodes, $machine, $root) = @ARGV;
my @WRITABLE = ('/work', '/tmp', '/dev/shm');
my $MB = 1 << 20;
my $TICK_S = 0.1;
my %NUMBERS = (    # prctl, prlimit64, clock_gettime, getrusage, statfs, capset
    x86_64  => [157, 302, 228, 98,  137, 126],
    aarch64 => [167, 261, 113, 165, 43,  91],
);
my ($PRCTL, $PRLIMIT, $CLOCK, $RUSAGE, $STATFS, $CAPSET) = @{ $NUMBERS{$machine} or die };
my %LIMITS = (     # RLIMIT number => value
    0 => $cpu_s, 1 => 256 * $MB, 4 => 0, 6 => $processes, 7 => 256, 8 => 65536, 9 => $memory_mb * $MB, 12 => 0,
);

open(my $in,  '<&', \*STDIN)  or die;    # close-on-exec, so commands never hold the host's pipes
open(my $out, '>&', \*STDOUT) or die;
open(STDIN,  '<', '/dev/null');
open(STDOUT, '>', '/dev/null');
open(STDERR, '>', '/dev/null');
binmode $_ for $in, $out;
$SIG{PIPE} = 'IGNORE';
$SIG{CHLD} = sub { };    # so that a child's end interrupts select
umask 0022;
syscall($PRCTL, 24, $_, 0, 0, 0) for 0 .. 63;    # no capability can come back through an exec
guard();

while (1) {
    my ($op, $size) = unpack('aN', fetch(5));
    my $payload = fetch($size);
    my $answer =
        $op eq 'X' ? run($payload)
      : $op eq 'W' ? as_agent(\&write_files, $payload)
      : $op eq 'R' ? as_agent(\&read_file, $payload)
      : $op eq 'C' ? clear()
      :              exit 1;
    give($op, $answer);
}

sub guard {    # a change of credentials undoes both: not dumpable, and killed with bwrap
    syscall($PRCTL, 4, 0, 0, 0, 0);
    syscall($PRCTL, 1, 9, 0, 0, 0);
}

sub fetch {
    my ($size) = @_;
    my $data = '';
    while (length($data) < $size) {
        my $n = sysread($in, $data, $size - length($data), length($data));
        next if !defined($n) && $!{EINTR};
        exit 0 unless $n;    # the host is gone, and with process 1 everything here goes
    }
    return $data;
}

sub give {
    my ($op, $answer) = @_;
    my $data = pack('aN', $op, length $answer) . $answer;
    my $at = 0;
    while ($at < length $data) {
        my $n = syswrite($out, $data, length($data) - $at, $at);
        next if !defined($n) && $!{EINTR};
        exit 0 unless $n;
        $at += $n;
    }
}

sub now {
    my $time = "\0" x 16;
    syscall($CLOCK, 1, $time);
    my ($s, $ns) = unpack('qq', $time);
    return $s + $ns / 1e9;
}

sub cpu_us {    # of all children reaped so far
    my $usage = "\0" x 144;
    syscall($RUSAGE, -1, $usage);
    my ($us, $uus, $ss, $sus) = unpack('q4', $usage);
    return ($us + $ss) * 1_000_000 + $uus + $sus;
}

sub files_used {
    my $used = 0;
    for my $folder (@WRITABLE) {
        my $stat = "\0" x 120;
        my $path = "$folder\0";
        next if syscall($STATFS, $path, $stat) != 0;
        my @fields = unpack('q7', $stat);    # type, block size, blocks, free, available, files, free files
        $used += $fields[5] - $fields[6];
    }
    return $used;
}

sub memory_used {    # resident private and shared-memory bytes of all but this process
    my $kb = 0;
    opendir(my $proc, '/proc') or return 0;
    for my $pid (grep { /^\d+$/ && $_ != 1 } readdir $proc) {
        open(my $status, '<', "/proc/$pid/status") or next;
        while (my $line = <$status>) { $kb += $1 if $line =~ /^Rss(?:Anon|Shmem):\s+(\d+)/ }
    }
    return $kb * 1024;
}

sub become_agent {    # in a child, for good
    for my $limit (keys %LIMITS) {
        my $pair = pack('QQ', $LIMITS{$limit}, $LIMITS{$limit});
        syscall($PRLIMIT, 0, $limit + 0, $pair, 0) == 0 or POSIX::_exit(126);
    }
    if ($root) {
        $) = "$uid $uid";
        POSIX::setgid($uid);
        POSIX::setuid($uid);
        POSIX::_exit(126) if POSIX::getuid() != $uid || $> != $uid || POSIX::setuid(0);
    }
    my ($header, $none) = (pack('LL', 0x20080522, 0), pack('L6', (0) x 6));
    syscall($CAPSET, $header, $none) == 0 or POSIX::_exit(126);
}

sub as_agent {    # files are touched with the agent's own rights, so that its links lead nowhere else
    my ($work, $payload) = @_;
    if ($root) { $) = "$uid $uid"; $> = $uid; }
    my $answer = $work->($payload);
    if ($root) { $> = 0; $) = 0; guard(); }
    return $answer;
}

sub write_files {
    my ($payload) = @_;
    my $at = 0;
    while ($at < length $payload) {
        my ($mode, $path, $content) = unpack("x$at N N/a N/a", $payload);
        $at += 12 + length($path) + length($content);
        my $full = $path =~ m{^/} ? $path : "/work/$path";
        my $parent = '';
        for my $part (split m{/}, $full =~ s{/[^/]*$}{}r) {
            next if $part eq '';
            $parent .= "/$part";
            -d $parent or mkdir $parent or return "cannot make folder $parent: $!";
        }
        unlink $full;
        sysopen(my $file, $full, O_WRONLY | O_CREAT | O_TRUNC, 0600) or return "cannot write $path: $!";
        binmode $file;
        print {$file} $content or return "cannot write $path: $!";
        close($file) or return "cannot write $path: $!";
        chmod $mode, $full;
    }
    return '';
}

sub read_file {
    my ($max, $path) = split /\n/, $_[0], 2;
    $path = "/work/$path" unless $path =~ m{^/};
    sysopen(my $file, $path, O_RDONLY | O_NONBLOCK) or return "-$!";
    my @stat = stat $file;
    return '-not a regular file' unless S_ISREG($stat[2]);
    return "-$stat[7] bytes, at most $max may be read" if $stat[7] > $max;
    binmode $file;
    my $content = '';
    while (length($content) < $max) {
        my $n = sysread($file, $content, $max - length($content), length $content);
        return "-$!" unless defined $n;
        last unless $n;
    }
    return "+$content";
}

sub end_all {    # kill(-1) spares only process 1; a fork in flight sees the signal and fails
    kill 'KILL', -1;
    1 while waitpid(-1, 0) > 0 || $!{EINTR};
}

sub clear {
    end_all();
    for my $folder (@WRITABLE) {
        opendir(my $dir, $folder) or next;
        my @left = grep { $_ ne '.' && $_ ne '..' } readdir $dir;
        my @folders = grep { !unlink "$folder/$_" } @left;
        system('/bin/rm', '-rf', '--', map { "$folder/$_" } @folders) if @folders;
        rewinddir $dir;
        @left = grep { $_ ne '.' && $_ ne '..' } readdir $dir;
        return "$folder still holds " . scalar(@left) . ' entries' if @left;
    }
    return '';
}

sub run {
    my ($header, $command) = split /\n/, $_[0], 2;
    my ($deadline_s, $keep) = split ' ', $header;
    my ($cpu, $start, $files) = (cpu_us(), now(), files_used());
    pipe(my $reader, my $writer) or return "126 0 0 0 0 -\n";
    my $child = fork;
    return "126 0 0 0 0 -\n" unless defined $child;
    if (!$child) {
        POSIX::setsid();
        POSIX::dup2(fileno $writer, 1);
        POSIX::dup2(fileno $writer, 2);
        chdir '/work';
        umask 0022;
        $SIG{PIPE} = 'DEFAULT';
        become_agent();
        exec {'/bin/bash'} 'bash', '--noprofile', '--norc', '-c', $command or POSIX::_exit(127);
    }
    close $writer;
    my $sink = { reader => $reader, head => '', tail => '', total => 0, half => $keep >> 1 };
    my ($status, $fault, $check) = (undef, '-', $start + $TICK_S);
    until (defined $status) {
        my $time = now();
        if ($time >= $start + $deadline_s) { $fault = 'timeout'; last }
        if ($time >= $check) {
            $check = $time + $TICK_S;
            my $used = files_used();
            if ($used > $inodes && $used > $files) { $fault = 'files';  last }
            if (memory_used() > $memory_mb * $MB)  { $fault = 'memory'; last }
        }
        my $left = $start + $deadline_s - $time;
        pump($sink, $left < $TICK_S ? $left : $TICK_S);
        while ((my $pid = waitpid(-1, POSIX::WNOHANG())) > 0) { $status = $? if $pid == $child }
    }
    end_all();
    1 while pump($sink, 0);
    return answer($sink, $status, $fault, cpu_us() - $cpu);
}

sub pump {    # false when there was nothing to read
    my ($sink, $wait_s) = @_;
    my $ready = '';
    vec($ready, fileno $sink->{reader}, 1) = 1 if $sink->{reader};
    vec($ready, fileno $in, 1) = 1;
    return 0 if select($ready, undef, undef, $wait_s) <= 0;
    exit 0 if vec($ready, fileno $in, 1);    # the host says nothing while a command runs: it is gone
    my $n = sysread($sink->{reader}, my $data, 65536);
    return 1 if !defined($n) && $!{EINTR};
    if (!$n) { $sink->{reader} = undef; return 0 }
    $sink->{total} += $n;
    my $room = $sink->{half} - length $sink->{head};
    if ($room > 0) { $sink->{head} .= substr($data, 0, $room, '') }
    if (length $data) {
        $data = $sink->{tail} . $data;
        $sink->{tail} = length $data > $sink->{half} ? substr($data, -$sink->{half}) : $data;
    }
    return 1;
}

sub answer {
    my ($sink, $status, $fault, $cpu) = @_;
    my ($code, $signal) = defined $status ? ($status >> 8, $status & 127) : (-1, 9);
    my $dropped = $sink->{total} - length($sink->{head}) - length($sink->{tail});
    my $header = join ' ', $code, $signal, $cpu, $dropped, length $sink->{head}, $fault;
    return "$header\n$sink->{head}$sink->{tail}";
}
