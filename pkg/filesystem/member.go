package filesystem

import (
	"os"
	"slices"
	"strings"
)

// owners begin the names of the signatures that make a device a part of something larger.
var owners = []string{"LVM2 ", "MD RAID ", "Intel RAID ", "DDF RAID ", "DRBD ", "GPT ", "MBR ", "bcache superblock", "VDO ", "ZFS ", "Ceph "}

func isOwner(found string) bool {
	return slices.ContainsFunc(owners, func(owner string) bool { return strings.HasPrefix(found, owner) })
}

// Membership names what makes an open device of so many bytes a part of something larger,
// which may be put to use at any time: a partition table, the label of a member of LVM
// or RAID. "": nothing does. What a file system covers at the end of the device is its
// own. An error is one of reading.
func Membership(f *os.File, bytes int64) (string, error) {
	d := &device{File: f, bytes: bytes}
	head, err := d.readAt(0, headSize)
	if err != nil {
		return "", err
	}
	found, _ := headSignatures(head, nil)
	found = slices.DeleteFunc(found, func(name string) bool { return !isOwner(name) })
	covered := int64(0)
	for _, k := range kinds {
		if sb, err := k.parse(head); err == nil && sb != nil {
			covered = max(covered, sb.bytes)
		}
	}
	tail, err := tailOwners(d, covered)
	return joinFindings(append(found, tail...)), err
}
