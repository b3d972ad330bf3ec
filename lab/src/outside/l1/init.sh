#!/bin/busybox sh
# SPDX-License-Identifier: GPL-2.0-only
# L1's first process: from the initrd to the read-only image with a tmpfs above. Each failure ends in a kernel panic,
# which the lab outside reports with the console.
set -e
/bin/busybox mkdir -p /proc /sys /dev /image /rw /new
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
modules=/layer/usr/lib/modules/$(uname -r)
while read -r module; do
	insmod "$modules/$module"
done <"$modules/load-order"
# lab_root and the names that stage2.sh uses are from the kernel's command line (machine/mod.rs).
looks=0
until [ -b "$lab_root" ]; do
	looks=$((looks + 1))
	[ $looks -lt 500 ]
	sleep 0.01
done
mount -t erofs -o ro "$lab_root" /image
mount -t tmpfs -o mode=0755,size=75% tmpfs /rw
mkdir /rw/upper /rw/work
mount -t overlay -o lowerdir=/layer:/image,upperdir=/rw/upper,workdir=/rw/work overlay /new
for mount in proc sys dev; do
	mount --move "/$mount" "/new/$mount"
done
# As switch_root does, without removing the initrd's files: /layer, the part that differs from run to run, is a layer of
# the new root, which saves copying it.
cd /new
mount --move . /
exec chroot . /cohort/stage2
