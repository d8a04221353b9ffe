// Keeps a copy of a database's tables in a file, always at the end of a transaction. Go 1.21.
//
//	go run client.go RELAY_URL BOOTSTRAP_URL DATABASE FILE
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"time"
)

type object = map[string]json.RawMessage // values as they came: no number loses a digit

// What is in the file.
type stored struct {
	Checkpoint json.RawMessage              `json:"checkpoint"`
	Tables     map[string]map[string]object `json:"tables"`
}

type message struct {
	Control, Source, Op string
	Code, Detail        string // of an error
	Scn, Seq            uint64
	Key                 json.RawMessage
	After               object
	Checkpoint          json.RawMessage
}

func (m message) Error() string { return m.Code + ": " + m.Detail }

type client struct {
	relay, bootstrap, database, file string
	copy                             stored
	online                           bool      // whether the relay is read, and not the bootstrap server
	changes                          []message // of the transaction that is being received
}

func isOnline(checkpoint json.RawMessage) bool {
	var found struct{ Mode string }
	return json.Unmarshal(checkpoint, &found) == nil && found.Mode == "online"
}

func (c *client) apply(change message) {
	table := c.copy.Tables[change.Source]
	if table == nil || change.Op == "t" {
		table = map[string]object{}
		c.copy.Tables[change.Source] = table
	}
	var key bytes.Buffer
	json.Compact(&key, change.Key)
	switch id := key.String(); {
	case change.Op == "t":
	case change.Op == "d":
		delete(table, id)
	case table[id] == nil:
		table[id] = change.After
	default: // An unchanged large value may be absent.
		for name, value := range change.After {
			table[id][name] = value
		}
	}
}

// The checkpoint becomes durable together with the changes before it.
func (c *client) store(checkpoint json.RawMessage) error {
	for _, change := range c.changes {
		c.apply(change)
	}
	c.changes, c.copy.Checkpoint = nil, checkpoint
	text, err := json.Marshal(c.copy)
	if err == nil {
		err = os.WriteFile(c.file+".new", text, 0o600)
	}
	if err == nil {
		err = os.Rename(c.file+".new", c.file)
	}
	return err
}

func (c *client) receive(m message, clock string) error {
	isEnd := m.Control == "end_of_window" || (m.Control == "heartbeat" && len(c.changes) == 0)
	switch {
	case m.Control == "":
		c.changes = append(c.changes, m)
	case m.Control == "error":
		return m
	case m.Control == "checkpoint":
		c.online = isOnline(m.Checkpoint) // The last one: the bootstrap is complete.
		return c.store(m.Checkpoint)
	case c.online && isEnd:
		position := fmt.Sprintf(`"scn":%d,"seq":%d`, m.Scn, m.Seq)
		return c.store(json.RawMessage(fmt.Sprintf(
			`{"v":1,"db":%q,"clock":%q,"mode":"online",%s}`, c.database, clock, position)))
	}
	return nil
}

func (c *client) read() error {
	query := url.Values{"format": {"ndjson"}}
	if c.copy.Checkpoint != nil {
		query.Set("checkpoint", string(c.copy.Checkpoint))
	}
	address := c.bootstrap + "/v1/" + c.database + "/bootstrap"
	if c.online {
		query.Set("follow", "true")
		address = c.relay + "/v1/" + c.database + "/stream"
	}
	answer, err := http.Get(address + "?" + query.Encode())
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	lines := bufio.NewReaderSize(answer.Body, 1<<16)
	for {
		line, err := lines.ReadBytes('\n')
		if len(bytes.TrimSpace(line)) == 0 && err != nil {
			return nil // An answer may end anywhere.
		}
		var m message
		if json.Unmarshal(line, &m) != nil {
			return nil // Not whole.
		}
		if answer.StatusCode != http.StatusOK {
			return m // A problem document with a stable code.
		}
		if err := c.receive(m, answer.Header.Get("Databus-Clock")); err != nil {
			return err
		}
	}
}

func main() {
	c := &client{relay: os.Args[1], bootstrap: os.Args[2], database: os.Args[3], file: os.Args[4]}
	if text, err := os.ReadFile(c.file); err == nil && json.Unmarshal(text, &c.copy) != nil {
		panic(c.file + " is damaged")
	}
	if c.copy.Tables == nil {
		c.copy.Tables = map[string]map[string]object{}
	}
	c.online = isOnline(c.copy.Checkpoint) // A new client begins with the whole tables.
	for {
		c.changes = nil // The server sends everything behind the stored checkpoint again.
		if err := c.read(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			if problem, ok := err.(message); ok && problem.Code == "scn_too_old" {
				c.online = false // The ring has moved on.
				continue
			}
			time.Sleep(500 * time.Millisecond)
		}
	}
}
