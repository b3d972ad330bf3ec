#!/bin/sh
# SPDX-License-Identifier: GPL-2.0-only
# L1's first process once its root is there: mounts what a host has, loads KVM, runs the command and reports its exit
# code. The lab outside ends the machine as soon as it has the code. Each failure before the command starts ends in a kernel
# panic, which the lab reports with the console.
set -e
export PATH=/cohort/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 TERM=dumb
cd /root

mkdir -p /dev/pts /dev/shm
mount -t devpts -o gid=5,mode=620 devpts /dev/pts
# The memory of guests is here.
mount -t tmpfs -o mode=1777,size=80% tmpfs /dev/shm
mount -t tmpfs -o mode=0755 tmpfs /run
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mount -t debugfs debugfs /sys/kernel/debug
mount -t tracefs tracefs /sys/kernel/tracing
# Debian's base-files makes it when it is installed, which it was not (image.rs).
rm -rf /var/run
ln -s /run /var/run
ln -s /proc/self/fd /dev/fd
ln -s /proc/self/fd/0 /dev/stdin
ln -s /proc/self/fd/1 /dev/stdout
ln -s /proc/self/fd/2 /dev/stderr
ip link set lo up
controllers=$(cat /sys/fs/cgroup/cgroup.controllers)
for controller in $controllers; do
	echo "+$controller" >/sys/fs/cgroup/cgroup.subtree_control
done

# Names from the kernel's command line; virtio ports have a number before theirs, and come one by one.
until [ -c $lab_stdout ] && [ -c $lab_control ]; do
	sleep 0.01
done
stdout=$(echo $lab_stdout)
control=$(echo $lab_control)
exec 3<>$control 4>$stdout
# Sets a serial port up, once what was written to it is sent. A virtio port needs nothing.
set_up_serial() {
	case $1 in
	/dev/tty*) stty -F "$1" raw -echo 115200 ;;
	esac
}
set_up_serial "$stdout"
set_up_serial "$control"

# One vendor's module loads; where none does, the command finds no /dev/kvm and says so.
if grep -qw svm /proc/cpuinfo; then
	modprobe kvm-amd nested=0
elif grep -qw vmx /proc/cpuinfo; then
	modprobe kvm-intel nested=0
fi

# Timers as coarse as ticks, and these at other times on each CPU, are those of no host that runs guests.
looks=0
while grep -q "hres_active *: 0" /proc/timer_list; do
	looks=$((looks + 1))
	if [ $looks = 200 ]; then
		echo "L1's kernel has no high-resolution timers: /proc/timer_list" >&2
		exit 1
	fi
	sleep 0.05
done

set +e
echo ready >&3
setsid sh /cohort/command </dev/null >&4 2>&1 3>&- 4>&- &
command=$!
# "stop" comes from outside after a timeout or a complaint of the kernel: what /out holds by then is still wanted.
(
	read -r _ <&3
	kill -TERM "-$command"
	sleep 1
	kill -KILL "-$command"
) 2>/dev/null &
wait $command
code=$?
dmesg >/out/dmesg
tar -C /out -cf /dev/lab-out .
sync /dev/lab-out
set_up_serial "$stdout"
echo "exit $code" >&3
# The lab ends the machine when it reads the line above.
while :; do
	sleep 1000
done
