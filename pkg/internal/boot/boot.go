// Package boot tells one boot of the machine from another.
package boot

import (
	"fmt"
	"os"
	"strings"
)

// ID returns the id of this boot of the kernel: random(4), boot_id.
func ID() (string, error) {
	const path = "/proc/sys/kernel/random/boot_id"
	id, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("reading the kernel's boot id: %w", err)
	}
	return strings.TrimSpace(string(id)), nil
}
