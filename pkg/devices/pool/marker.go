package pool

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/durable"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
)

const (
	markerFile    = ".csi-node-pool"
	seenSuffix    = ".uuid"
	markerVersion = 1
)

// marker is the contents of the file that makes a directory a pool.
type marker struct {
	Version int    `json:"version"`
	UUID    string `json:"uuid"`
}

// identify returns the UUID of the pool in dir, making dir a pool if it never
// was one and holds nothing.
func identify(dir string) (string, error) {
	seen, err := readSeen(dir)
	if err != nil {
		return "", err
	}
	have, err := readMarker(dir)
	switch {
	case seen != "" && errors.As(err, new(*os.PathError)): // its disk does not answer
		return "", fmt.Errorf("%w: %w", absentError(dir, seen), err)
	case seen != "" && err != nil: // what was attached of it must still be taken down
		return "", fmt.Errorf("the pool %s %w: %w", seen, errAbsent, err)
	case err != nil:
		return "", err
	case have == nil && seen != "":
		return "", absentError(dir, seen)
	case have == nil:
		if have, err = initialize(dir); err != nil {
			return "", err
		}
	case have.UUID != seen && seen != "":
		return "", otherError(dir, have.UUID, seen)
	}
	if seen == "" {
		return have.UUID, writeFile(dir+seenSuffix, []byte(have.UUID+"\n"))
	}
	return have.UUID, nil
}

// writeFile replaces a file, or makes it, durably.
func writeFile(path string, contents []byte) error {
	if err := durable.Replace(path, contents); err != nil {
		return err
	}
	return durable.SyncDir(filepath.Dir(path))
}

// mountedOrKnown returns an error unless there is, or was, a pool in dir, or a file system is
// mounted there.
func mountedOrKnown(dir string) error {
	seen, err := readSeen(dir)
	if err != nil || seen != "" {
		return err
	}
	have, err := readMarker(dir)
	if err != nil || have != nil {
		return err
	}
	var st unix.Statx_t
	err = unix.Statx(unix.AT_FDCWD, dir, 0, unix.STATX_TYPE, &st)
	if err == nil && st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 { // Linux 5.8
		return nil
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return &os.PathError{Op: "statx", Path: dir, Err: err}
	}
	return errors.New("no disk is mounted there, and with --pool-require-mount no pool is made elsewhere: mount the disk of the pool")
}

// initialize makes an empty or missing directory a pool. The marker comes
// before everything else, also before <dir>.uuid, so that the next Open can go on after a
// crash at any point.
func initialize(dir string) (*marker, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		if name := entry.Name(); name != "lost+found" && name != markerFile+durable.NewSuffix {
			return nil, fmt.Errorf("the directory is no pool, and it holds %q: give an empty directory, or move away what is in this one", name)
		}
	}
	m := &marker{Version: markerVersion, UUID: uuid.NewString()}
	raw, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	if err := writeFile(filepath.Join(dir, markerFile), raw); err != nil {
		return nil, err
	}
	return m, durable.SyncDir(filepath.Dir(dir))
}

// readMarker returns nil when there is no marker in dir, or no dir.
func readMarker(dir string) (*marker, error) {
	path := filepath.Join(dir, markerFile)
	raw, err := rawfile.Read(path)
	if err != nil {
		return nil, ignore(err, os.ErrNotExist)
	}
	m := &marker{}
	err = json.Unmarshal(raw, m)
	m.UUID = strings.TrimSpace(m.UUID) // as that in <dir>.uuid is read
	if err == nil && m.UUID == "" {
		err = errors.New("it names no UUID")
	}
	if err != nil {
		return nil, fmt.Errorf("the marker %s is damaged: %w. Write {\"version\":1,\"uuid\":\"…\"} to it, with the UUID that %s holds", path, err, dir+seenSuffix)
	}
	return m, nil
}

// readSeen returns the UUID of the pool once seen at dir, "" when none was.
func readSeen(dir string) (string, error) {
	path := dir + seenSuffix
	raw, err := os.ReadFile(path)
	if err != nil {
		return "", ignore(err, os.ErrNotExist)
	}
	uuid := strings.TrimSpace(string(raw))
	if uuid == "" {
		return "", fmt.Errorf("%s is empty: write the UUID of the pool to it, or remove it if there never was a pool", path)
	}
	return uuid, nil
}

// errAbsent is in the errors about a pool that was seen in its directory before
// and is not there now, as far as its marker tells.
var errAbsent = errors.New("that was seen here is not here now")

func absentError(dir, uuid string) error {
	return fmt.Errorf("the pool %s %w, perhaps its disk is not mounted: mount it, or remove %s if a new pool is to be made", uuid, errAbsent, dir+seenSuffix)
}

// errOther is in the errors about a directory that has another pool than was seen there.
var errOther = errors.New("and the one seen here before is")

func otherError(dir, have, want string) error {
	return fmt.Errorf("here is the pool %s, %w %s: mount the right disk, or remove %s if this pool is to be used from now on", have, errOther, want, dir+seenSuffix)
}
