package filesystem

import "testing"

func TestKernelLogRecords(t *testing.T) {
	for facts, want := range map[string]bool{"6,1,2,-": false, "5,1": false, "4,1": true, "3,9,9,c": true, "11,": true, "14,": false, "": false, "x": false} {
		if got := isWarning(facts); got != want {
			t.Errorf("%q: %t", facts, got)
		}
	}
	for message, want := range map[string]bool{
		"XFS (loop3): why": true, "BTRFS error (device loop3): why": true, "BTRFS error (device loop3 state E): why": true,
		"XFS (loop33): why": false, "BTRFS error (device loop33): why": false, "BTRFS: device /dev/loop3 (7:3) scanned": false,
	} {
		if got := namesDevice(message, "loop3"); got != want {
			t.Errorf("%q: %t", message, got)
		}
	}
}

// Before it knows its device a file system names none, each kind in its own way.
func TestKernelLogOfNoDeviceYet(t *testing.T) {
	for message, of := range map[string]string{
		"EXT4-fs: Value of option \"sb\" is invalid":           "ext4",
		"XFS: invalid logbufs value":                           "xfs",
		"BTRFS error (device <unknown>): unrecognized option":  "btrfs",
		"BTRFS info (device loop4): another device's messages": "none of these",
	} {
		for _, fsType := range []string{"ext4", "xfs", "btrfs", "vfat"} {
			if got := concerns(message, fsType, "loop3"); got != (fsType == of) {
				t.Errorf("%q concerns a mount of %s: %t", message, fsType, got)
			}
		}
	}
}
